"""Conversion of chats to tokens by a checkpoint's template. Open `chat_format.py` first."""
