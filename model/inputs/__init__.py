"""What comes from outside: files and paths, read strictly, and the words in which they are refused."""
