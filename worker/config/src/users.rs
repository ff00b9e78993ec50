//! `[users.jwt]`: tokens of users that another system signs.

use super::read::Section;
use std::path::PathBuf;
use std::time::Duration;
use wakeful_workflow::id::DEFAULT_SPACE;

/// How users prove who they are, beside the tokens that Wakeful itself signs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Users {
    pub jwt: Option<Jwt>,
}

/// The issuer of JSON Web Tokens whose bearers are users.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Jwt {
    /// The `iss` of its tokens.
    pub issuer: String,
    /// A token names one of these in `aud`.
    pub audience: Vec<String>,
    pub keys: JwtKeys,
    /// The algorithms that a token may be signed with. All of them have a public key.
    pub algorithms: Vec<String>,
    /// The claim that names the user.
    pub user_claim: String,
    /// The claim that names the space. `None`: every user is in `space`.
    pub space_claim: Option<String>,
    pub space: String,
    /// The claim that names the agent of the conversations that the user begins.
    pub agent_claim: Option<String>,
    /// How far the clocks may differ.
    pub leeway: Duration,
    /// The longest time from now until a token's end.
    pub longest: Duration,
    /// How old the keys may be before they are read again.
    pub refresh: Duration,
    /// The shortest time between two readings of the keys, whatever the tokens name.
    pub refetch: Duration,
}

/// Where the issuer's public keys are: a JSON Web Key Set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JwtKeys {
    Url(String),
    File(PathBuf),
}

/// The algorithms with a public key. With HS256 and its kin, a server that can check a token can sign one, and `none` signs nothing.
pub const JWT_ALGORITHMS: [&str; 9] =
    ["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "EdDSA"];

/// Reads `[users]`.
pub(super) fn read(mut section: Section<'_>) -> Users {
    let users = Users { jwt: jwt(section.section("jwt")) };
    section.finish();
    users
}

/// Reads the section. `None` if it is empty, or if it is wrong.
fn jwt(mut section: Section<'_>) -> Option<Jwt> {
    const KEYS: [&str; 13] = [
        "issuer",
        "audience",
        "jwks_url",
        "jwks_file",
        "algorithms",
        "user_claim",
        "space_claim",
        "space",
        "agent_claim",
        "leeway_s",
        "longest_s",
        "refresh_s",
        "refetch_s",
    ];
    let given = KEYS.iter().find_map(|key| section.origin(key));
    let seconds = Duration::from_secs;
    let not_empty = |text: &str| (!text.is_empty()).then(|| text.to_owned());
    let claim = "must be the name of a claim";
    let issuer = section.text("issuer", "must be the issuer as its tokens name it", not_empty);
    let audience = section.list("audience").filter(|names| !names.is_empty());
    let url =
        section.text("jwks_url", "must begin with https://; http:// is for this machine alone", jwks_url);
    let file = section.path("jwks_file");
    let at = section.origin("algorithms");
    let algorithms = section.list("algorithms").unwrap_or_else(|| vec!["RS256".into(), "ES256".into()]);
    if let (Some(at), Some(wrong)) =
        (at, algorithms.iter().find(|name| !JWT_ALGORITHMS.contains(&name.as_str())))
    {
        let known = JWT_ALGORITHMS.join(", ");
        section.problem(at, format!("{} has {wrong:?}: it takes {known}", section.full("algorithms")));
    }
    let (user_claim, space_claim) = (
        section.text("user_claim", claim, not_empty).unwrap_or_else(|| "sub".to_owned()),
        section.text("space_claim", claim, not_empty),
    );
    let space = super::read::space(&mut section).unwrap_or_else(|| DEFAULT_SPACE.to_owned());
    let agent_claim = section.text("agent_claim", claim, not_empty);
    let day = seconds(86_400);
    let leeway = section.seconds("leeway_s", Duration::ZERO..=seconds(300)).unwrap_or(seconds(30));
    let longest = section.seconds("longest_s", seconds(1)..=day * 31).unwrap_or(day);
    let refresh = section.seconds("refresh_s", seconds(1)..=seconds(3600)).unwrap_or(seconds(600));
    let refetch =
        section.seconds("refetch_s", Duration::from_millis(10)..=seconds(3600)).unwrap_or(seconds(30));
    let keys = match (url, file) {
        (Some(url), None) => Some(JwtKeys::Url(url)),
        (None, Some(file)) => Some(JwtKeys::File(file)),
        _ => None,
    };
    let jwt = match (issuer, audience, keys) {
        (Some(issuer), Some(audience), Some(keys)) => Some(Jwt {
            issuer,
            audience,
            keys,
            algorithms,
            user_claim,
            space_claim,
            space,
            agent_claim,
            leeway,
            longest,
            refresh,
            refetch,
        }),
        _ => {
            if let Some(given) = given {
                let text = "users.jwt needs `issuer`, `audience`, and either `jwks_url` or `jwks_file`";
                section.problem(given, text.to_owned());
            }
            None
        }
    };
    section.finish();
    jwt
}

/// Keys that somebody on the way could replace prove nothing.
fn jwks_url(text: &str) -> Option<String> {
    let url = url::Url::parse(text).ok()?;
    let local = match url.host()? {
        url::Host::Domain(name) => name == "localhost",
        url::Host::Ipv4(address) => address.is_loopback(),
        url::Host::Ipv6(address) => address.is_loopback(),
    };
    let fits = url.scheme() == "https" || (url.scheme() == "http" && local);
    (fits && url.username().is_empty() && url.password().is_none()).then(|| text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::jwks_url;

    #[test]
    fn keys_come_over_tls_or_from_this_machine() {
        for (url, fits) in [
            ("https://login.example.org/keys", true),
            ("http://127.0.0.1:8080/keys", true),
            ("http://[::1]/keys", true),
            ("http://localhost/keys", true),
            ("http://login.example.org/keys", false),
            ("http://127.0.0.1.example.org/keys", false),
            ("https://user:secret@login.example.org/keys", false),
            ("file:///etc/passwd", false),
            ("keys", false),
        ] {
            assert_eq!(jwks_url(url).is_some(), fits, "{url}");
        }
    }
}
