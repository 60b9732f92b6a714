"""Texts of HTML, PDF and DOCX files. A process of its own reads them, within bounds of size, time and memory.

These formats are complicated, and a stranger's file may be made to exploit that. So a file can slow, fill or crash only
that process, which runs nothing that a file holds, and follows no reference out of a file.
"""
