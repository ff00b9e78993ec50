//! Outgoing mail that bounced, as its provider reports it.

use crate::email::bounce::{self, is_delivery};
use wakeful_engine::ctx::Ctx;
use wakeful_http::problem::Problem;

pub(super) use crate::email::bounce::Bounce;

/// Records the bounce at its delivery.
///
/// # Errors
/// The store's errors, as problems.
pub(super) async fn note(ctx: &Ctx, bounce: &Bounce) -> Result<(), Problem> {
    bounce::take_bounce(ctx, bounce).await?;
    Ok(())
}

/// The delivery with this Message-ID. Ours have the form `<DELIVERY@DOMAIN>`.
pub(super) fn delivery_of(message_id: &str) -> Option<String> {
    let (local, _) = message_id.trim().trim_start_matches('<').split_once('@')?;
    is_delivery(local).then(|| local.to_owned())
}

/// The first enhanced status code in a server's reply, or the general code of its class.
pub(super) fn status_in(said: &str, permanent: bool) -> String {
    let is_number = |part: &str| (1..=3).contains(&part.len()) && part.bytes().all(|b| b.is_ascii_digit());
    let is_status = |word: &&str| {
        let mut parts = word.split('.');
        matches!(parts.next(), Some("4" | "5"))
            && parts.next().is_some_and(is_number)
            && parts.next().is_some_and(is_number)
            && parts.next().is_none()
    };
    let mut words =
        said.split(|c: char| !(c.is_ascii_digit() || c == '.')).map(|word| word.trim_matches('.'));
    let class = if permanent { "5.0.0" } else { "4.0.0" };
    words.find(is_status).unwrap_or(class).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_our_own_message_ids_name_a_delivery() {
        let cases = [
            ("<dlv_0192@example.com>", Some("dlv_0192")),
            ("dlv_0192@example.com", Some("dlv_0192")),
            (" <dlv_0192@example.com> ", Some("dlv_0192")),
            ("<0192@example.com>", None),
            ("<dlv_@example.com>", None),
            ("<dlv_a' or 1=1@example.com>", None),
            ("<dlv_0192>", None),
            ("", None),
        ];
        for (message_id, delivery) in cases {
            assert_eq!(delivery_of(message_id).as_deref(), delivery, "{message_id}");
        }
    }

    #[test]
    fn a_status_is_read_out_of_what_a_server_said() {
        let cases = [
            ("smtp;550 5.1.1 The email account does not exist", true, "5.1.1"),
            ("host mx[10.1.2.3] said: 452 4.2.2 full (in reply)", false, "4.2.2"),
            ("550 no such user", true, "5.0.0"),
            ("", false, "4.0.0"),
            ("550-5.7.26. Unauthenticated", true, "5.7.26"),
        ];
        for (said, permanent, status) in cases {
            assert_eq!(status_in(said, permanent), status, "{said}");
        }
    }
}
