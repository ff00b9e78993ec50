//! Converts Slack's text. Incoming references become readable; outgoing text contains no references.

/// The text as a person sees it: `<@U1|ann>` is `@ann`, `<https://x|here>` is `here (https://x)`.
pub(super) fn readable(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('<') {
        out.push_str(&unescaped(before));
        let Some((reference, after)) = after.split_once('>') else {
            out.push('<');
            rest = after;
            continue;
        };
        out.push_str(&unescaped(&shown(reference)));
        rest = after;
    }
    out.push_str(&unescaped(rest));
    out
}

fn shown(reference: &str) -> String {
    let (target, label) = match reference.split_once('|') {
        Some((target, label)) if !label.is_empty() => (target, Some(label)),
        Some((target, _)) => (target, None),
        None => (reference, None),
    };
    if let Some(user) = target.strip_prefix('@') {
        return format!("@{}", label.unwrap_or(user));
    }
    if let Some(channel) = target.strip_prefix('#') {
        return format!("#{}", label.unwrap_or(channel));
    }
    if let Some(special) = target.strip_prefix('!') {
        let name = special.split('^').nth(1).unwrap_or(special);
        return label.map_or_else(|| format!("@{name}"), str::to_owned);
    }
    let address = target.strip_prefix("mailto:").or_else(|| target.strip_prefix("tel:")).unwrap_or(target);
    match label {
        Some(label) if label != address && label != target => format!("{label} ({address})"),
        Some(_) | None => address.to_owned(),
    }
}

fn unescaped(text: &str) -> String {
    text.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
}

/// Escapes text so that Slack shows it literally: it mentions no user, and no link hides its target.
pub(super) fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_are_readable() {
        for (written, read) in [
            ("<@U1> hi", "@U1 hi"),
            ("<@U1|ann>, see <#C1|general>", "@ann, see #general"),
            ("<!here> <!subteam^S1|@team> <!subteam^S2>", "@here @team @S2"),
            ("<!date^1392734382^{date}|yesterday>", "yesterday"),
            ("<https://a.example/x?a=1&amp;b=2>", "https://a.example/x?a=1&b=2"),
            ("<https://a.example|here>", "here (https://a.example)"),
            ("<mailto:ann@example.org|ann@example.org>", "ann@example.org"),
            ("1 &lt; 2 &amp;amp; 3", "1 < 2 &amp; 3"),
            ("an open < end", "an open < end"),
            ("", ""),
        ] {
            assert_eq!(readable(written), read, "{written}");
        }
    }

    #[test]
    fn what_goes_out_refers_to_nothing() {
        let text = "<!everyone> <@U1> <https://bank.example|https://other.example> & more";
        let out = escaped(text);
        assert!(!out.contains('<') && !out.contains('>'), "{out}");
        assert_eq!(readable(&out), text);
    }
}
