//! Session ids on the command line: the beginning of one is enough, if no other session begins so.

use super::super::space::Space;
use super::{Usage, Verb};
use wakeful_http::sessions::is_beginning;
use wakeful_store::Store;

/// How many sessions with one beginning are looked at.
const SHOWN: i64 = 20;

impl Verb {
    /// The ids of sessions that the command names.
    pub(super) fn sessions(&mut self) -> Vec<&mut String> {
        match self {
            Verb::Show { id, .. }
            | Verb::Tail { id, .. }
            | Verb::Send { id, .. }
            | Verb::Tree { id }
            | Verb::Terminate { id, .. }
            | Verb::Why { id } => vec![id],
            Verb::Retry(args) => args.bulk.ids.iter_mut().collect(),
            Verb::Cancel(args) | Verb::Archive(args) | Verb::Wake(args) => args.ids.iter_mut().collect(),
            Verb::Resolve(args) => vec![&mut args.session],
            Verb::Approve(args) | Verb::Decline(args) => vec![&mut args.session],
            Verb::Fork(args) => vec![&mut args.id],
            Verb::Export(args) => vec![&mut args.id],
            Verb::Context(args) => vec![&mut args.id],
            Verb::Files(args) => vec![&mut args.id],
            Verb::Checkout(args) => vec![&mut args.id],
            Verb::Recover(args) => args.id.iter_mut().collect(),
            Verb::Verify(args) => args.ids.iter_mut().collect(),
            Verb::Diff(args) => vec![&mut args.left, &mut args.right],
            Verb::List { .. } | Verb::New(_) | Verb::Import(_) => Vec::new(),
        }
    }
}

/// Replaces each beginning of an id by the whole id. Any other word stays: the command says that there is no such session.
pub(super) async fn complete(store: &Store, space: &Space, verb: &mut Verb) -> anyhow::Result<()> {
    for id in verb.sessions() {
        if !is_beginning(id) {
            continue;
        }
        let mut found = store.sessions_that_begin(id, SHOWN).await?;
        if space.named().is_some() {
            let mut own = Vec::new();
            for one in found {
                if space.has(store, &[&one]).await.is_ok() {
                    own.push(one);
                }
            }
            found = own;
        }
        match found.as_slice() {
            [] => {}
            [whole] => id.clone_from(whole),
            [first, second, ..] => {
                let text = format!(
                    "{id} is the beginning of several sessions, such as {first} and {second}: give more of it"
                );
                return Err(Usage(text).into());
            }
        }
    }
    Ok(())
}
