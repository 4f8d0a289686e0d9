"""Certificates for servers under test."""

import subprocess


def make_certificate(folder, name, *, authority=None):
    """Return a key and a certificate, self-signed or signed by `authority`."""
    key, certificate = folder / f"{name}.key", folder / f"{name}.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", key, "-out", certificate, "-days", "2", "-subj", f"/CN={name}"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1"]
    if authority is not None:
        command += ["-CA", folder / f"{authority}.pem", "-CAkey", folder / f"{authority}.key"]
        command += ["-addext", "basicConstraints=critical,CA:FALSE"]
    subprocess.run(command, check=True, capture_output=True)
    return str(certificate), str(key)
