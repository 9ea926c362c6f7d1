"""Input from outside: strict readers of files and paths, and the wording of their errors."""
