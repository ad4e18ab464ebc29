"""Folders of Hugging Face, in and out."""
