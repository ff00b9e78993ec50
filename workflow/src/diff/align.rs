//! Pairs the turns of two sessions.

use super::ids::Ids;
use super::side::Side;
use super::sides::Sides;
use super::turn::Turn;
use crate::record::text_of;
use sha2::{Digest, Sha256};
use similar::{Algorithm, DiffOp, capture_diff_slices};
use std::collections::{BTreeSet, HashMap};
use std::hash::Hash;
use std::ops::Range;

/// A turn of the left, of the right, or of both.
pub(super) type Row = Sides<Option<usize>>;

type Fingerprint = [u8; 32];

/// The turns side by side, in order. Each turn is in exactly one row.
///
/// Pairs turns one by one as long as both sides say and do the same. After that, pairs equal turns, however
/// far apart they are. Between those, pairs turns with the same input and the same tools, and then the rest
/// in order.
pub(super) fn turns(left: &Side, of_left: &[Turn<'_>], right: &Side, of_right: &[Turn<'_>]) -> Vec<Row> {
    let (one, other) = (fingerprints(left, of_left), fingerprints(right, of_right));
    let alike = one.iter().zip(&other).take_while(|(one, other)| one == other).count();
    let mut rows: Vec<Row> = (0..alike).map(|at| Row { left: Some(at), right: Some(at) }).collect();
    let (shape, other_shape) = (shapes(of_left), shapes(of_right));
    let rest = Sides { left: alike..one.len(), right: alike..other.len() };
    for block in blocks(&one, &other, rest) {
        match block {
            Block::Same(same) => rows.extend(zip(same)),
            Block::Between(between) => {
                for block in blocks(&shape, &other_shape, between) {
                    match block {
                        Block::Same(range) | Block::Between(range) => rows.extend(zip(range)),
                    }
                }
            }
        }
    }
    rows
}

/// Pairs the calls of two turns: in order if both sides have the same number of calls, otherwise equal calls
/// first.
pub(super) fn calls<K: Hash + Ord>(left: &[K], right: &[K]) -> Vec<Row> {
    let whole = Sides { left: 0..left.len(), right: 0..right.len() };
    if left.len() == right.len() {
        return zip(whole).collect();
    }
    blocks(left, right, whole)
        .into_iter()
        .flat_map(|block| match block {
            Block::Same(range) | Block::Between(range) => zip(range),
        })
        .collect()
}

/// A pair of ranges that are equal, or that have nothing in common.
enum Block {
    Same(Sides<Range<usize>>),
    Between(Sides<Range<usize>>),
}

/// Splits `within` into the ranges of a longest common subsequence and the ranges between them, in order.
fn blocks<K: Hash + Ord>(left: &[K], right: &[K], within: Sides<Range<usize>>) -> Vec<Block> {
    let (one, other) = (&left[within.left.clone()], &right[within.right.clone()]);
    let same = matches(one, other).into_iter().map(|(at, beside, len)| {
        let (at, beside) = (within.left.start + at, within.right.start + beside);
        Sides { left: at..at + len, right: beside..beside + len }
    });
    let mut blocks = Vec::new();
    let mut done = Sides { left: within.left.start, right: within.right.start };
    let end = Sides { left: within.left.end..within.left.end, right: within.right.end..within.right.end };
    for same in same.chain([end]) {
        let between = Sides { left: done.left..same.left.start, right: done.right..same.right.start };
        if !between.left.is_empty() || !between.right.is_empty() {
            blocks.push(Block::Between(between));
        }
        done = Sides { left: same.left.end, right: same.right.end };
        if !same.left.is_empty() {
            blocks.push(Block::Same(same));
        }
    }
    blocks
}

/// The equal stretches as (start on the left, start on the right, length). Swapping the sides gives the same
/// stretches.
pub(super) fn matches<K: Hash + Ord>(left: &[K], right: &[K]) -> Vec<(usize, usize, usize)> {
    // Replace keys by numbers in the keys' order, because the search compares each key many times.
    let all: BTreeSet<&K> = left.iter().chain(right).collect();
    let rank: HashMap<&K, u32> = all.into_iter().zip(0..).collect();
    let ranks = |keys: &[K]| -> Vec<u32> { keys.iter().map(|key| rank[key]).collect() };
    let (one, other) = (ranks(left), ranks(right));
    // Between two equally good answers the algorithm takes the first, which depends on the order of the
    // sides. So always pass the sides in the same order.
    let swapped = one > other;
    let (one, other) = if swapped { (other, one) } else { (one, other) };
    // The algorithm bounds its work: for long and unlike inputs it returns a good answer and not the best
    // one.
    capture_diff_slices(Algorithm::Myers, &one, &other)
        .into_iter()
        .filter_map(|op| match op {
            DiffOp::Equal { old_index, new_index, len } if swapped => Some((new_index, old_index, len)),
            DiffOp::Equal { old_index, new_index, len } => Some((old_index, new_index, len)),
            DiffOp::Delete { .. } | DiffOp::Insert { .. } | DiffOp::Replace { .. } => None,
        })
        .collect()
}

/// Pairs first with first and second with second. The rest of the longer range stays unpaired.
fn zip(range: Sides<Range<usize>>) -> impl Iterator<Item = Row> {
    let longest = range.left.len().max(range.right.len());
    (0..longest).map(move |at| Row {
        left: Some(range.left.start + at).filter(|at| range.left.contains(at)),
        right: Some(range.right.start + at).filter(|at| range.right.contains(at)),
    })
}

/// A hash of each turn. Turns that say and do the same have equal hashes.
fn fingerprints(side: &Side, turns: &[Turn<'_>]) -> Vec<Fingerprint> {
    let ids = Ids::blind(side);
    turns
        .iter()
        .map(|turn| {
            let mut hasher = Sha256::new();
            for record in turn.records() {
                hasher.update(ids.record(record).to_string());
                hasher.update([0]);
            }
            hasher.update([u8::from(turn.answer.is_some())]);
            hasher.finalize().into()
        })
        .collect()
}

/// A hash of each turn. Turns with the same input that call the same tools have equal hashes.
fn shapes(turns: &[Turn<'_>]) -> Vec<Fingerprint> {
    turns
        .iter()
        .map(|turn| {
            let mut hasher = Sha256::new();
            for input in &turn.inputs {
                hasher.update(text_of(&input.content));
                hasher.update([0]);
            }
            hasher.update([1]);
            for call in turn.calls() {
                hasher.update(&call.name);
                hasher.update([0]);
            }
            hasher.update([u8::from(turn.answer.is_some())]);
            hasher.finalize().into()
        })
        .collect()
}
