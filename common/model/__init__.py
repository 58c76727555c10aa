"""The model: its one definition, its files, its tokenizer, its transfer. Open `network/decoder.py`
first.
"""
