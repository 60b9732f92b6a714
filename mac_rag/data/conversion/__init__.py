"""Texts of other programs' files, by kept libraries: web pages (html), PDF (pdf), and word processors (office)."""
