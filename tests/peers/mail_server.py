"""An aiosmtpd SMTP server on loopback: STARTTLS or TLS, with a login. Prints one line of JSON when it listens, and one
per mail.

    mail_server.py DIR starttls|tls

DIR gets the certificate authority (ca.pem) and a DKIM key of each kind (rsa.pem, ed25519.pem) with its DNS record.
dkimpy verifies every mail's signature with the record in DIR.
"""

import base64
import json
import socket
import signal
import ssl
import sys
from pathlib import Path

import dkim
import trustme
from aiosmtpd.controller import Controller
from aiosmtpd.smtp import SMTP, AuthResult, LoginPassword
from cryptography.hazmat.primitives import serialization as form
from cryptography.hazmat.primitives.asymmetric import ed25519, rsa

folder, security = Path(sys.argv[1]), sys.argv[2]


def say(**facts):
    print(json.dumps(facts), flush=True)


def key(name, private, record):
    pem = private.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())
    (folder / f"{name}.pem").write_bytes(pem)
    records[f"{name}._domainkey.example.org.".encode()] = record


records = {}
private = rsa.generate_private_key(public_exponent=65537, key_size=2048)
der = private.public_key().public_bytes(form.Encoding.DER, form.PublicFormat.SubjectPublicKeyInfo)
key("rsa", private, b"v=DKIM1; k=rsa; p=" + base64.b64encode(der))
private = ed25519.Ed25519PrivateKey.generate()
raw = private.public_key().public_bytes(form.Encoding.Raw, form.PublicFormat.Raw)
key("ed25519", private, b"v=DKIM1; k=ed25519; p=" + base64.b64encode(raw))


class Keep:
    async def handle_RCPT(self, server, session, envelope, address, options):
        if address.startswith("nobody@"):
            return "550 5.1.1 No such user"
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(self, server, session, envelope):
        mail = envelope.content
        say(
            mail_from=envelope.mail_from,
            to=envelope.rcpt_tos,
            tls=security == "tls" or session.ssl is not None,
            user=session.auth_data,
            signed=b"DKIM-Signature" in mail,
            verified=dkim.verify(mail, dnsfunc=lambda name, timeout=5: records.get(name)),
            forged=dkim.verify(mail.replace(b"table", b"chair"), dnsfunc=lambda name, timeout=5: records.get(name)),
            mail=mail.decode("ascii"),
        )
        return "250 OK"


def check(server, session, envelope, mechanism, data):
    if isinstance(data, LoginPassword) and (data.login, data.password) == (b"desk", b"sesame"):
        return AuthResult(success=True, auth_data=data.login.decode())
    return AuthResult(success=False, handled=False)


authority = trustme.CA()
authority.cert_pem.write_to_path(folder / "ca.pem")
context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
authority.issue_cert("localhost").configure_cert(context)


class Server(Controller):
    def factory(self):
        starttls = context if security == "starttls" else None
        return SMTP(
            self.handler,
            hostname="localhost",
            tls_context=starttls,
            require_starttls=starttls is not None,
            auth_required=True,
            auth_require_tls=starttls is not None,
            authenticator=check,
        )

    def _trigger_server(self):
        # The controller only knows the port 0 that it was given, so ask the socket.
        socket.create_connection(self.server.sockets[0].getsockname()).close()


controller = Server(Keep(), hostname="127.0.0.1", port=0, ssl_context=context if security == "tls" else None)
controller.start()
say(port=controller.server.sockets[0].getsockname()[1])
signal.pause()
