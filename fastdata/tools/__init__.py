"""The commands of ``fastdata``, one file each, and the code that they share.

Only the package's own ``__init__.py`` imports from this wing.

__main__.py     the command line
bench.py        published recipes, by torchvision and by fastdata
tune.py         the fastest settings of a loader, found by coordinate ascent
judge.py        measurements of settings, and the better one of two
tune_result.py  the measurements as a table, with the call to paste
diagnose.py     the parts of a training loop and of its loader, measured
diagnosis.py    the limit of a loop and the advice, derived from these measurements
timed_loop.py   a loop that is timed from the outside, also inside a script
doctor.py       checks of this machine
build.py        making a cache from a folder of images
inspect.py      the contents of caches, and their damage
prune.py        removing caches that no run can use
measure.py      samples per second of a loader, in a forked process
recipes.py      published transforms, and the user's own by name
photos.py       images drawn by the computer, for measurements
arguments.py    arguments that several commands have
figures.py      measurements as JSON, with versions and machine
"""
