"""What a server of any kind needs in front of clients."""

#: Bytes of a request's body.
LARGEST = 1 << 20
