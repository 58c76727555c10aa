"""The one model definition, its files, its tokenizer and its way through the weight store.
Open `decoder.py` first."""
