"""Banks behind a URL: read through a local cache, and put there from a folder.

object_store    whole files and ranges of files, through fsspec, with retries and the project's errors
cache           the folder where what was fetched is kept for later runs, and its bound
range_file      one large file, of which only the ranges that were asked for are there
segment         a segment whose rows are fetched before they are read
store           the bank: its last commit, and the next ones
upload          puts a bank there
examination     checks every byte of it
"""
