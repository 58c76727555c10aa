"""The model: its one definition, its files, its tokenizer, its transfer. Open `decoder.py`
first.
"""
