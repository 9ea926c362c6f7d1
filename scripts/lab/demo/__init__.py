"""The training of the embedded demo: its text, tokenizer, training loop and checkpoint. The command is `train_demo`."""
