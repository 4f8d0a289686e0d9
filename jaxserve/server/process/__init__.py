"""The processes of `jaxserve serve`, from the listening sockets to the parsed request: no route is known here."""
