"""Work spread over a Ray cluster: the cells of an evaluation, the requests of a server."""
