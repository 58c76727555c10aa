"""Model definition, model files and tokenizers. Open `network/decoder.py` first."""
