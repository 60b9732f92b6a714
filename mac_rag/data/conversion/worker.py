"""The process that converts files: a line of JSON in, `{"path": ...}`, and one out, with the text or an error.

Started by `mac_rag.data.conversion.converter`. It ends when its standard input does.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path

from mac_rag.data.conversion.texts import UnreadableError, cleaned, one_line
from mac_rag.untrusted_files import DOCUMENT, MalformedError, open_file

# Bytes of a file, whose pictures may be most of it.
LARGEST_FILE = 256 << 20
_MEMORY = 4 << 30  # bytes of address space, of which the libraries' own take some


def converted(path: Path) -> dict[str, object]:
    """The answer for one file."""
    try:
        with open_file(path, follow=True) as file:
            if os.fstat(file.fileno()).st_size > LARGEST_FILE:
                raise UnreadableError(f"has more than {LARGEST_FILE:,} bytes; split it into files")
            # Imported for the format that is needed.
            match path.suffix.lower():
                case ".pdf":
                    from mac_rag.data.conversion.pdf import read_pdf as read
                case ".docx":
                    from mac_rag.data.conversion.docx import read_docx as read
                case _:
                    from mac_rag.data.conversion.html import read_html as read
            text, title = read(file)
        text = cleaned(text)
        if len(text.encode()) > DOCUMENT:
            raise UnreadableError(f"has a text of more than {DOCUMENT:,} bytes, the most of one document; split it")
        return {"text": text, "title": one_line(title or "") or None}
    except UnreadableError as error:
        return {"error": str(error)}
    except MalformedError as error:
        return {"error": f"cannot be read: {error}; give a file"}
    except OSError as error:
        return {"error": f"cannot be read: {error.strerror or error}"}
    except MemoryError:
        return {"error": "takes too much memory to convert; convert it to text by other means"}


def main() -> None:
    """Answers until there are no more questions."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever libraries print is no answer
    logging.disable()
    _bound_memory()
    for line in sys.stdin.buffer:
        answer = converted(Path(json.loads(line)["path"]))
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()


def _bound_memory() -> None:
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    except (ImportError, OSError, ValueError):  # not every system has it; the bounds of size and time stay
        pass


if __name__ == "__main__":
    main()
