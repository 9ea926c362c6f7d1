"""Pages of K/V in a folder or a bucket, where other engines with the same weights find them, too.

It knows numpy, the standard library and `model.inputs` only.
"""
