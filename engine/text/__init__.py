"""Text at the front end: tokens to text and back, chat templates, stop strings. No torch.

`Tokenizer` and `TextStream` are the ways in.
"""
