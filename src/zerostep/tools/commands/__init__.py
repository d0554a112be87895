"""The commands of the command line, one module each: options, help text and printing.

matplotlib is imported only where a picture is drawn: it is slow, and optional. Read `convert` first, the shortest.
"""
