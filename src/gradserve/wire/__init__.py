"""The words that every layer speaks: arrays, ops, losses, errors and the protobuf codec.

Nothing here computes, touches a disk or imports another part of gradserve.
"""
