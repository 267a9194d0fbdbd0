"""The compiled core: its library, and the calls that make a batch.

library.py opens the library and reads its records, calls.py makes batches, and jpeg.py decodes
files. records.h lists everything that Python and C share.
"""
