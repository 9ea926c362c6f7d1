"""The ladders of padded shapes. Both limits are themselves rungs, so that no legal step lacks a program."""
