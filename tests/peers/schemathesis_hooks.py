"""How Schemathesis sends bodies that are not JSON: mails and bundles, as the bytes that it makes up."""

import schemathesis


@schemathesis.serializer("message/rfc822", "application/x-ndjson", "application/gzip")
def as_it_is(context, value):
    return value if isinstance(value, bytes) else str(value).encode()
