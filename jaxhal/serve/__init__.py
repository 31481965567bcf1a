"""What a server of any kind needs in front of clients."""
