"""Other engines than our own under the same loop: same data order, same metrics, same run folder."""
