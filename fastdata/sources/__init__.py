"""Sources of samples: which samples exist, and how each is read. A source never keeps a sample.

source.py           the interface of all sources, and keys of items that are not pairs
files.py            image files, on this machine or behind a URL
folders.py          class folders, listed as torchvision lists them
manifest.py         the CSV parser; paths and labels from a CSV file, a frame or a list
items.py            items of any map-style dataset
tars.py             WebDataset's tars
remote.py           a folder here or behind a URL; only this module imports fsspec
remote_errors.py    errors of remote file systems, without secrets
identity.py         texts that identify datasets, by which caches are found
requests.py         samples that are requested before they are read
local_files.py      a folder of this machine, for remote.py; temporary and private folders
storage_options.py  options of remote file systems, which may be secret
"""
