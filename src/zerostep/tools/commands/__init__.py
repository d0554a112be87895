"""The commands of the command line, one module each: options, help text and printing.

A module imports what does the work inside its functions where that is slow to import, so that `zerostep --help` is
quick. Read `convert` first, the shortest.
"""
