"""What `scripts.train_demo` is made of: the text, the tokenizer, the training loop, the checkpoint it writes."""
