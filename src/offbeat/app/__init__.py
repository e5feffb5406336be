"""What is built on the library: runs, studies, the command line, reports."""
