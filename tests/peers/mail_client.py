"""A mail program and the sending half of a mail server, built only on Python's smtplib and email.

    mail_client.py post|read

Takes one object of JSON on stdin, and prints one.

post: {"protocol": "lmtp"|"smtp", "port", "rcpt", "id", "text", "headers"?} hands over a mail from Ann with this Message-ID.
"answers" may hold a received mail. Then the new mail answers it as a mail program would, to its Reply-To unless "rcpt" is
given. Prints the recipient, the error, and the refused recipients with the server's replies.

read: {"mail"} prints the mail as Python's parser reads it.
"""

import json
import smtplib
import sys
from email import message_from_string, policy
from email.message import EmailMessage

ANN = "Ann <ann@example.com>"


def read(mail):
    return message_from_string(mail, policy=policy.default)


def write(asked):
    mail = EmailMessage()
    mail["From"], mail["Message-ID"] = ANN, f"<{asked['id']}>"
    mail["Date"] = "Sat, 31 Jan 2026 12:00:00 +0000"
    text = asked["text"]
    if "answers" in asked:
        answered = read(asked["answers"])
        mail["To"] = asked.get("rcpt") or answered["Reply-To"]
        mail["Subject"] = answered["Subject"]
        mail["In-Reply-To"] = answered["Message-ID"]
        mail["References"] = f"{answered['References']} {answered['Message-ID']}"
        quoted = "".join(f"> {line}\n" for line in answered.get_content().splitlines())
        text += f"\n\nOn Sat, 31 Jan 2026 at 12:00, {answered['From']} wrote:\n{quoted}"
    else:
        mail["To"], mail["Subject"] = asked["rcpt"], "Ein Tisch für zwei"
    for name, value in asked.get("headers", {}).items():
        mail[name] = value
    mail.set_content(text)
    return mail


def post(asked):
    mail = write(asked)
    rcpt = mail["To"].addresses[0].addr_spec
    kind = {"lmtp": smtplib.LMTP, "smtp": smtplib.SMTP}[asked["protocol"]]
    with kind("127.0.0.1", asked["port"], local_hostname="mx.example.org") as server:
        try:
            refused = server.send_message(mail, "ann@example.com", [rcpt])
            return {"rcpt": rcpt, "error": None, "refused": refused}
        except smtplib.SMTPRecipientsRefused as error:
            refused = {to: [code, words.decode()] for to, (code, words) in error.recipients.items()}
            return {"rcpt": rcpt, "error": type(error).__name__, "refused": refused}


def told(mail):
    mail = read(mail)
    ids = lambda name: (mail[name] or "").split()
    return {
        "defects": [repr(defect) for defect in mail.defects],
        "from": mail["From"],
        "to": mail["To"],
        "cc": mail["Cc"],
        "subject": mail["Subject"],
        "reply_to": mail["Reply-To"],
        "message_id": mail["Message-ID"],
        "in_reply_to": ids("In-Reply-To"),
        "references": ids("References"),
        "auto_submitted": mail["Auto-Submitted"],
        "date": mail["Date"].datetime.timestamp(),
        "text": mail.get_content(),
    }


asked = json.load(sys.stdin)
answer = post(asked) if sys.argv[1] == "post" else told(asked["mail"])
print(json.dumps(answer, default=str))
