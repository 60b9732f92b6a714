"""Bytes on disk: segments, the manifest that names them, the writer's lock, verification and repair."""
