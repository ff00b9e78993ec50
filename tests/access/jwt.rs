//! Users' tokens that another system signs, against a real server of keys and with real signatures.

use super::stage::{Stage, TOKEN, problem, send};
use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::rsa::KeySize;
use aws_lc_rs::signature::{
    ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, Ed25519KeyPair, KeyPair, RSA_PKCS1_SHA256, RsaKeyPair,
};
use aws_lc_rs::{hmac, rsa};
use axum::Json;
use axum::http::StatusCode as Answered;
use axum::routing::get;
use base64::Engine as _;
use base64::prelude::BASE64_URL_SAFE_NO_PAD as BASE64;
use chrono::Utc;
use futures::future::join_all;
use reqwest::StatusCode;
use serde_json::{Value, json};
use std::sync::{Arc, Mutex};

const ISSUER: &str = "https://login.example.org/";

/// A key that signs, with its public half as the issuer publishes it.
enum Signer {
    Ec(EcdsaKeyPair),
    Rsa(RsaKeyPair),
    Ed(Ed25519KeyPair),
}

struct Key {
    id: String,
    signer: Signer,
}

impl Key {
    fn ec(id: &str) -> Key {
        let pair = EcdsaKeyPair::generate(&ECDSA_P256_SHA256_FIXED_SIGNING).unwrap();
        Key { id: id.to_owned(), signer: Signer::Ec(pair) }
    }

    fn rsa(id: &str) -> Key {
        let pair = rsa::KeyPair::generate(KeySize::Rsa2048).unwrap();
        Key { id: id.to_owned(), signer: Signer::Rsa(pair) }
    }

    fn ed(id: &str) -> Key {
        Key { id: id.to_owned(), signer: Signer::Ed(Ed25519KeyPair::generate().unwrap()) }
    }

    fn algorithm(&self) -> &'static str {
        match self.signer {
            Signer::Ec(_) => "ES256",
            Signer::Rsa(_) => "RS256",
            Signer::Ed(_) => "EdDSA",
        }
    }

    fn public(&self) -> Value {
        let mut key = match &self.signer {
            Signer::Ec(pair) => {
                let point = pair.public_key().as_ref();
                json!({"kty": "EC", "crv": "P-256", "x": BASE64.encode(&point[1..33]), "y": BASE64.encode(&point[33..])})
            }
            Signer::Rsa(pair) => {
                let modulus = pair.public_key().modulus().big_endian_without_leading_zero();
                let exponent = pair.public_key().exponent().big_endian_without_leading_zero();
                json!({"kty": "RSA", "n": BASE64.encode(modulus), "e": BASE64.encode(exponent)})
            }
            Signer::Ed(pair) => {
                json!({"kty": "OKP", "crv": "Ed25519", "x": BASE64.encode(pair.public_key().as_ref())})
            }
        };
        key["kid"] = json!(self.id);
        key["alg"] = json!(self.algorithm());
        key["use"] = json!("sig");
        key
    }

    fn sign(&self, text: &[u8]) -> Vec<u8> {
        let random = SystemRandom::new();
        match &self.signer {
            Signer::Ec(pair) => pair.sign(&random, text).unwrap().as_ref().to_vec(),
            Signer::Rsa(pair) => {
                let mut signature = vec![0; pair.public_modulus_len()];
                pair.sign(&RSA_PKCS1_SHA256, &random, text, &mut signature).unwrap();
                signature
            }
            Signer::Ed(pair) => pair.sign(text).as_ref().to_vec(),
        }
    }

    fn token(&self, claims: &Value) -> String {
        self.token_with(&json!({"alg": self.algorithm(), "typ": "JWT", "kid": self.id}), claims)
    }

    fn token_with(&self, head: &Value, claims: &Value) -> String {
        let text = unsigned(head, claims);
        let signature = BASE64.encode(self.sign(text.as_bytes()));
        format!("{text}.{signature}")
    }
}

fn unsigned(head: &Value, claims: &Value) -> String {
    format!("{}.{}", BASE64.encode(head.to_string()), BASE64.encode(claims.to_string()))
}

/// The claims of a token that fits, with changes.
fn claims(changes: Value) -> Value {
    let now = Utc::now().timestamp();
    let mut claims = json!({"iss": ISSUER, "aud": "wakeful", "sub": "ann", "iat": now, "exp": now + 600});
    for (name, value) in changes.as_object().unwrap() {
        if value.is_null() {
            claims.as_object_mut().unwrap().remove(name);
        } else {
            claims[name] = value.clone();
        }
    }
    claims
}

/// A server of keys.
struct Keys {
    url: String,
    listed: Arc<Mutex<Vec<Value>>>,
    /// How often they were fetched.
    fetched: Arc<Mutex<usize>>,
    away: Arc<Mutex<bool>>,
}

impl Keys {
    fn serve(listed: Vec<Value>) -> Keys {
        let keys = Keys {
            url: String::new(),
            listed: Arc::new(Mutex::new(listed)),
            fetched: Arc::default(),
            away: Arc::default(),
        };
        let (listed, fetched, away) =
            (Arc::clone(&keys.listed), Arc::clone(&keys.fetched), Arc::clone(&keys.away));
        let answer = move || {
            *fetched.lock().unwrap() += 1;
            let answer = if *away.lock().unwrap() {
                (Answered::SERVICE_UNAVAILABLE, Json(json!({})))
            } else {
                (Answered::OK, Json(json!({"keys": *listed.lock().unwrap()})))
            };
            std::future::ready(answer)
        };
        let listener = crate::support::servers::listen();
        let url = format!("http://{}/keys", listener.local_addr().unwrap());
        let routes = axum::Router::new().route("/keys", get(answer));
        crate::support::servers::runtime().spawn(async move { axum::serve(listener, routes).await.unwrap() });
        Keys { url, ..keys }
    }

    fn fetched(&self) -> usize {
        *self.fetched.lock().unwrap()
    }

    fn config(&self, more: &str) -> String {
        format!(
            "[agents.other]\nmodel = \"openai/test\"\nsystem_prompt = \"x\"\n\
             [users.jwt]\nissuer = \"{ISSUER}\"\naudience = [\"wakeful\"]\njwks_url = \"{}\"\n{more}",
            self.url
        )
    }
}

async fn status(stage: &Stage, token: &str) -> (u16, String) {
    let (status, body) = stage.get(token, "/v1/sessions").await;
    (status.as_u16(), problem(&body).to_owned())
}

#[tokio::test]
async fn a_jwt_of_the_issuer_is_a_users_token_and_one_that_does_not_fit_is_refused() {
    let (ec, rsa, ed, stranger) = (Key::ec("k1"), Key::rsa("k2"), Key::ed("k3"), Key::ec("k1"));
    let secret = "a secret in a public set";
    let hmac_key = json!({"kty": "oct", "kid": "k4", "alg": "HS256", "k": BASE64.encode(secret)});
    let odd = json!({"kty": "new", "kid": "k5"});
    let keys = Keys::serve(vec![odd, hmac_key, ec.public(), rsa.public(), ed.public()]);
    let config = keys.config("algorithms = [\"RS256\", \"ES256\", \"EdDSA\"]\nleeway_s = 5");
    let stage = Stage::new(&config).await;
    for key in [&ec, &rsa, &ed] {
        assert_eq!(status(&stage, &key.token(&claims(json!({})))).await.0, 200, "{}", key.algorithm());
    }
    let now = Utc::now().timestamp();
    // The clocks may differ a little.
    assert_eq!(status(&stage, &ec.token(&claims(json!({"exp": now - 2})))).await.0, 200);
    assert_eq!(status(&stage, &ec.token(&claims(json!({"aud": ["x", "wakeful"]})))).await.0, 200);
    for (changes, why) in [
        (json!({"iss": "https://evil.example.org/"}), "another issuer"),
        (json!({"iss": [ISSUER, "https://evil.example.org/"]}), "another issuer"),
        (json!({"iss": null}), "lacks"),
        (json!({"aud": "others"}), "another audience"),
        (json!({"aud": null}), "lacks"),
        (json!({"exp": now - 60}), "expired"),
        (json!({"exp": null}), "lacks"),
        (json!({"exp": now + 90_000}), "more than 86400 s"),
        (json!({"exp": 1e300}), "exp"),
        (json!({"nbf": now + 60}), "not valid yet"),
        (json!({"sub": null}), "\"sub\""),
        (json!({"sub": 7}), "\"sub\""),
        (json!({"sub": ""}), "\"sub\""),
        (json!({"sub": "a\u{0}b"}), "\"sub\""),
        (json!({"sub": "x".repeat(257)}), "\"sub\""),
    ] {
        let (got, said) = status(&stage, &ec.token(&claims(changes.clone()))).await;
        assert_eq!(got, 401, "{changes}: {said}");
        assert!(said.contains(why), "{changes}: {said}");
    }
    let good = ec.token(&claims(json!({})));
    let (head, rest) = good.split_once('.').unwrap();
    let (body, signature) = rest.split_once('.').unwrap();
    let forged_body = BASE64.encode(claims(json!({"sub": "bob"})).to_string());
    // A public key as the secret of an HMAC, the secret in the set, and no signature at all.
    let confused = |id: &str, secret: &[u8]| {
        let text = unsigned(&json!({"alg": "HS256", "kid": id}), &claims(json!({})));
        let tag = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, secret), text.as_bytes());
        format!("{text}.{}", BASE64.encode(tag))
    };
    let of = |head: Value| ec.token_with(&head, &claims(json!({})));
    for (what, token) in [
        ("another body", format!("{head}.{forged_body}.{signature}")),
        ("no signature", format!("{head}.{body}.")),
        ("another key of this name", stranger.token(&claims(json!({})))),
        ("none", format!("{}.", unsigned(&json!({"alg": "none"}), &claims(json!({}))))),
        ("a public key as a secret", confused("k1", ec.public()["x"].as_str().unwrap().as_bytes())),
        ("a public key's modulus", confused("k2", &BASE64.decode(rsa.public()["n"].as_str().unwrap()).unwrap())),
        ("the secret of the set", confused("k4", secret.as_bytes())),
        ("the algorithm of another key", of(json!({"alg": "ES256", "kid": "k2"}))),
        ("an algorithm that is not configured", of(json!({"alg": "ES384", "kid": "k1"}))),
        ("a key of its own", stranger.token_with(
            &json!({"alg": "ES256", "jwk": stranger.public(), "jku": "http://127.0.0.1:1/", "kid": "own"}),
            &claims(json!({})),
        )),
        ("what it calls critical", of(json!({"alg": "ES256", "kid": "k1", "crit": ["b64"], "b64": false}))),
        ("half of it", good[..good.len() / 2].to_owned()),
        ("noise", "eyJ.eyJ.eyJ".to_owned()),
        ("a long one", format!("eyJ{}..", "A".repeat(20_000))),
    ] {
        let (got, said) = status(&stage, &token).await;
        assert!(got == 401 || (what == "a long one" && got == 431), "{what}: {got} {said}");
    }
    // Only one key of the set fits this one, so it needs no name.
    assert_eq!(status(&stage, &of(json!({"alg": "ES256"}))).await.0, 200);
}

#[tokio::test]
async fn a_jwt_reaches_its_users_conversations_in_its_space_and_nothing_else() {
    let key = Key::ec("k1");
    let keys = Keys::serve(vec![key.public()]);
    let more = "user_claim = \"uid\"\nspace_claim = \"tenant\"\nagent_claim = \"agent\"";
    let stage = Stage::new(&keys.config(more)).await;
    let of = |user: &str, space: &str, agent: Option<&str>| {
        key.token(&claims(json!({"uid": user, "tenant": space, "agent": agent})))
    };
    let ann = of("ann", "acme", None);
    let id = stage.chat(&ann, "c1", json!({"text": "Hi"})).await;
    let path = format!("/v1/sessions/{id}");
    let (found, session) = stage.get(&ann, &path).await;
    assert_eq!((found, &session["space_id"]), (StatusCode::OK, &json!("acme")));
    for (token, expected) in [
        (of("bob", "acme", None), StatusCode::NOT_FOUND),
        (of("ann", "other", None), StatusCode::NOT_FOUND),
        (of("ann", "acme", Some("other")), StatusCode::NOT_FOUND),
        (of("ann", "acme", Some("default")), StatusCode::OK),
        (key.token(&claims(json!({"uid": "ann"}))), StatusCode::UNAUTHORIZED),
        (of("ann", "no/space", None), StatusCode::UNAUTHORIZED),
    ] {
        let (got, body) = stage.get(&token, &path).await;
        assert_eq!(got, expected, "{body}");
    }
    // The header does not lead out of the token's space.
    let other = stage.request(&ann, reqwest::Method::GET, &path).header("x-wakeful-space", "default");
    assert_eq!(send(other).await.0, StatusCode::FORBIDDEN);
    // A user does not choose the agent: the issuer does.
    let asks = json!({"text": "Hi", "agent": "other"});
    assert_eq!(stage.post(&ann, "/v1/chat/c2/messages", &asks).await.0, StatusCode::FORBIDDEN);
    let to_other = of("ann", "acme", Some("other"));
    assert_eq!(stage.post(&to_other, "/v1/chat/c2/messages", &asks).await.0, StatusCode::ACCEPTED);
    for (method, path) in [("POST", "/v1/user-tokens"), ("GET", "/v1/audit"), ("POST", "/v1/sessions/x/fork")]
    {
        let request = stage.request(&ann, method.parse().unwrap(), path).body("{}");
        assert_eq!(send(request).await.0, StatusCode::FORBIDDEN, "{path}");
    }
    let (_, audit) = stage.get(TOKEN, "/v1/audit?verb=chat.message").await;
    assert_eq!(audit["items"][0]["actor_kind"], "user", "{audit}");
    assert!(!stage.process.log().contains(&ann), "no token is in the log");
}

#[tokio::test]
async fn keys_are_cached_renewed_when_they_rotate_and_fetched_few_times_whatever_the_tokens_name() {
    let (old, new) = (Key::ec("old"), Key::ec("new"));
    let keys = Keys::serve(vec![old.public()]);
    let stage = Stage::new(&keys.config("refetch_s = 0.05")).await;
    let fits = async |key: &Key| status(&stage, &key.token(&claims(json!({})))).await.0;
    for _ in 0..20 {
        assert_eq!(fits(&old).await, 200);
    }
    assert_eq!(keys.fetched(), 1, "one fetch for all");
    // The issuer rotates: the new key is found at once, and the old one is gone with it.
    *keys.listed.lock().unwrap() = vec![new.public()];
    crate::support::eventually("the new key", || async { (fits(&new).await == 200).then_some(()) }).await;
    assert_eq!(fits(&old).await, 401);
    // Away: the keys that are known stay in use, and an unknown one cannot be checked.
    *keys.away.lock().unwrap() = true;
    assert_eq!(fits(&new).await, 200);
    let (got, said) = status(&stage, &Key::ec("none").token(&claims(json!({})))).await;
    assert_eq!((got, said.contains("names a key")), (401, true), "{said}");
    assert_eq!(fits(&new).await, 200);
}

#[tokio::test]
async fn ten_thousand_unknown_keys_are_one_fetch() {
    let key = Key::ec("k1");
    let keys = Keys::serve(vec![key.public()]);
    let stage = Stage::new(&keys.config("")).await;
    let client = crate::support::http();
    let url = format!("{}/v1/sessions", stage.process.url());
    let count = crate::trial::share(10_000);
    for many in (0..count).collect::<Vec<_>>().chunks(50) {
        let asked = many.iter().map(|number| {
            let token =
                key.token_with(&json!({"alg": "ES256", "kid": format!("x{number}")}), &claims(json!({})));
            client.get(&url).bearer_auth(token).send()
        });
        for answer in join_all(asked).await {
            assert_eq!(answer.unwrap().status(), StatusCode::UNAUTHORIZED);
        }
    }
    assert_eq!(keys.fetched(), 1);
    assert_eq!(status(&stage, &key.token(&claims(json!({})))).await.0, 200);
}

#[tokio::test]
async fn without_keys_a_jwt_cannot_be_checked_and_a_file_of_keys_will_do() {
    let key = Key::ec("k1");
    let keys = Keys::serve(vec![key.public()]);
    *keys.away.lock().unwrap() = true;
    let stage = Stage::new(&keys.config("refetch_s = 0.05")).await;
    let token = key.token(&claims(json!({})));
    let (got, said) = status(&stage, &token).await;
    assert_eq!((got, said.contains("cannot be read now")), (503, true), "{said}");
    *keys.away.lock().unwrap() = false;
    crate::support::eventually("the keys", || async {
        (status(&stage, &token).await.0 == 200).then_some(())
    })
    .await;
    // Other tokens never depended on it.
    assert_eq!(status(&stage, TOKEN).await.0, 200);
    let file = stage.options.path("keys.json");
    std::fs::write(&file, json!({"keys": [key.public()]}).to_string()).unwrap();
    let config = format!(
        "[users.jwt]\nissuer = \"{ISSUER}\"\naudience = [\"wakeful\"]\njwks_file = \"{}\"",
        file.display()
    );
    let of_file = Stage::new(&config).await;
    assert_eq!(status(&of_file, &token).await.0, 200);
    let doctor = async |stage: &Stage| {
        let mut options = stage.options.clone();
        options.args = ["doctor", "-o", "json"].map(str::to_owned).to_vec();
        options.spawn(&stage.database.url).ended().await.1.output()
    };
    assert!(doctor(&of_file).await.contains("has 1 key for users' tokens"));
    std::fs::write(&file, "[]").unwrap();
    let report = doctor(&of_file).await;
    assert!(report.contains("the keys of https://login.example.org/ cannot be read"), "{report}");
    // Without the section, a JWT counts as a wrong token.
    let none = Stage::new("").await;
    assert_eq!(status(&none, &token).await.0, 401);
}
