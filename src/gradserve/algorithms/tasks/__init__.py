"""A whole training as a file: what ``gradserve train`` reads, and what every training writes as its manifest.

trainers  the trainers by the names that a file uses
keywords  what a trainer's constructor and ``fit`` may be told, read from their signatures
task      a file's tables, checked; the calls that they stand for
calls     a call as data: it can be made, or written as Python
manifest  the other way: the tables of a trainer that is there
plan      what a training will do, in numbers, before it begins
templates the projects that ``gradserve init`` writes
"""
