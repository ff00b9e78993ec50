//! The parts of the step commit's statement that few commits have: deliveries, drained inbox rows and blobs.

use super::builder::Statement;
use super::rows::Rare;
use crate::delivery::deliver_jobs;
use crate::new_id;
use std::borrow::Cow;
use wakeful_workflow::blob::Blob;

impl Statement<'_> {
    /// Deliveries and their jobs, drained inbox rows and blobs.
    pub(super) fn rare(&mut self, rare: &Rare<'_>) {
        if !rare.deliveries.is_empty() {
            let ids = self.bind(column(rare.deliveries, |_| new_id("dlv")));
            let channels = self.bind(column(rare.deliveries, |one| one.channel.as_str()));
            let keys = self.bind(column(rare.deliveries, |one| one.source_key.as_str()));
            let contents = self.bind(column(rare.deliveries, |one| {
                if !rare.seal.is_on() {
                    return one.content.to_string();
                }
                let mut content = one.content.clone();
                rare.seal.value(&mut content);
                content.to_string()
            }));
            macro_rules! text {
                ($deliver_jobs:tt) => {
                    $deliver_jobs
                };
            }
            let deliver_jobs = deliver_jobs!(text);
            self.part(format_args!(
                "to_deliver as (
    insert into deliveries
        (delivery_id, space_id, conversation_id, channel, ordinal, session_id, source_key, content)
    select r.delivery_id, b.space_id, b.conversation_id, r.channel, nextval('delivery_ordinals'), b.session_id,
        r.source_key, r.content::json
    from b, unnest(${ids}::text[], ${channels}::text[], ${keys}::text[], ${contents}::text[])
        as r (delivery_id, channel, source_key, content)
    on conflict (session_id, source_key, channel) do nothing
    returning space_id, conversation_id, channel, (select b.trace_context from b) as trace_context
), deliver_jobs as ({deliver_jobs}
)"
            ));
        }
        if !rare.drained.is_empty() {
            let ids = self.bind(rare.drained);
            self.part(format_args!(
                "drained as (
    update session_inbox
    set status = 'drained'
    from b
    where session_inbox.session_id = b.session_id
        and session_inbox.space_id = b.space_id
        and session_inbox.inbox_id = any (${ids}::bigint[])
)"
            ));
        }
    }

    /// The blobs of encrypted sessions: long outputs, large values, and the snapshots that their closes point at. They come before the
    /// blobs in clear, as an erasure takes them.
    pub(super) fn sealed_blobs(&mut self, rare: Option<&Rare<'_>>) {
        let snapshots = self.commits.iter().zip(1..).filter_map(|(commit, member)| {
            let close = commit.closes.as_ref()?;
            let (data_key, bytes) = close.sealed_snapshot.as_ref()?;
            let (snapshot, bytes) = (&close.snapshot, Cow::Borrowed(bytes.as_slice()));
            Some(SealedRow { member, data_key, blob: snapshot, bytes })
        });
        let of_rare = rare.iter().flat_map(|rare| {
            let of = move |data_key| {
                rare.blobs.iter().map(move |blob| {
                    let bytes = Cow::Owned(rare.seal.bytes(&blob.bytes));
                    SealedRow { member: 1, data_key, blob, bytes }
                })
            };
            rare.seal.key_id().into_iter().flat_map(of)
        });
        let blobs: Vec<SealedRow<'_>> = snapshots.chain(of_rare).collect();
        if blobs.is_empty() {
            return;
        }
        let data_keys = self.bind(column(&blobs, |row| row.data_key));
        let names = self.bind(column(&blobs, |row| row.blob.sha256.as_str()));
        let sizes = self.bind(column(&blobs, |row| row.blob.bytes.len() as i64));
        let bytes = self.bind(column(&blobs, |row| &*row.bytes));
        let types = self.bind(column(&blobs, |row| row.blob.media_type));
        let members = self.bind(column(&blobs, |row| row.member));
        let member = if self.alone() { "1" } else { "b.member" };
        self.part(format_args!(
            "new_sealed_blobs as (
    insert into sealed_blobs (data_key, sha256, space_id, size, media_type, bytes)
    select r.data_key, r.sha256, b.space_id, r.size, r.media_type, r.bytes
    from b join unnest(${data_keys}::text[], ${names}::text[], ${sizes}::bigint[], ${bytes}::bytea[], ${types}::text[], ${members}::bigint[])
        as r (data_key, sha256, size, bytes, media_type, member) on r.member = {member}
    order by r.data_key, r.sha256
    on conflict (data_key, sha256) do nothing
)"
        ));
    }

    /// The blobs that the commits' entries and messages point at, in the sessions' spaces. They are sorted by name and come
    /// after all locks on rows: so two statements that write the same blobs wait for each other, and cannot deadlock.
    pub(super) fn blobs(&mut self, rare: Option<&Rare<'_>>) {
        let snapshots = self
            .commits
            .iter()
            .zip(1..)
            .filter_map(|(commit, member)| Some((member, commit.closes.as_ref()?)))
            .filter(|(_, close)| close.sealed_snapshot.is_none())
            .map(|(member, close)| (member, &close.snapshot));
        let of_rare = rare.iter().filter(|rare| !rare.seal.is_on()).flat_map(|rare| rare.blobs);
        let of_rare = of_rare.map(|blob| (1, blob));
        let blobs: Vec<(i64, &Blob)> = snapshots.chain(of_rare).collect();
        if blobs.is_empty() {
            return;
        }
        let names = self.bind(column(&blobs, |(_, blob)| blob.sha256.as_str()));
        let bytes = self.bind(column(&blobs, |(_, blob)| blob.bytes.as_slice()));
        let types = self.bind(column(&blobs, |(_, blob)| blob.media_type));
        let from = if self.alone() {
            format!(
                "b, unnest(${names}::text[], ${bytes}::bytea[], ${types}::text[]) as r (sha256, bytes, media_type)"
            )
        } else {
            let members = self.bind(column(&blobs, |(member, _)| *member));
            format!(
                "b join unnest(${members}::bigint[], ${names}::text[], ${bytes}::bytea[], ${types}::text[])
        as r (member, sha256, bytes, media_type) on r.member = b.member"
            )
        };
        self.part(format_args!(
            "new_blobs as (
    insert into blobs (space_id, sha256, size, media_type, bytes)
    select b.space_id, r.sha256, length(r.bytes), r.media_type, r.bytes
    from {from}
    order by r.sha256, b.space_id
    on conflict (sha256, space_id) do nothing
)"
        ));
        // An erasure that looks for one of them at this moment leaves it. A blob that most sessions share has no mark, so this waits for
        // no other commit.
        self.part(format_args!(
            "kept_blobs as (
    update blobs k set touched_at = now()
    from {from}
    where k.sha256 = r.sha256 and k.space_id = b.space_id and k.touched_at = '-infinity'
)"
        ));
    }
}

/// A blob of an encrypted session.
struct SealedRow<'b> {
    /// The place of its commit in the statement.
    member: i64,
    data_key: &'b str,
    blob: &'b Blob,
    bytes: Cow<'b, [u8]>,
}

/// Collects one value of each row, for an array parameter.
fn column<'a, T, C>(rows: &'a [T], value: impl Fn(&'a T) -> C) -> Vec<C> {
    rows.iter().map(value).collect()
}
