"""The compiled core: its library and the calls that draw and serve a batch.

library.py opens the library and reads its records, calls.py draws and serves batches, jpeg.py
decodes files. records.h lists all that Python and C share.
"""
