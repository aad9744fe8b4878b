//! Memory whose cache lines travel a short way between two CPUs.
//!
//! On large machines each part of memory has a home, a socket or a part of one, and a line that two
//! cores exchange passes its home. Where the system knows the homes (NUMA nodes), memory is bound
//! to one, like threads to CPUs. A virtual machine mostly does not know them, and its memory is
//! mixed. The distance is therefore measured, so that figures depend on the CPUs and not on the
//! pages that the queues happened to get.

use super::{Cores, pingpong};
use anyhow::{Context, Result};
use clap::ValueEnum;
use dma::Memory;
use driver::MemorySource;
use std::sync::{Arc, Mutex};
use sync::Unpoisoned;

/// Minimum size of a candidate piece in bytes. Neighbouring pages have the same home, and pieces
/// should differ.
const PIECE: usize = 4 << 20;
/// Number of pages measured in a piece: those at its start, where a device's queues are.
const PAGES: usize = 64;
/// Minimum and maximum number of candidate pieces. The minimum is needed to know the shortest
/// distance.
const MIN_SAMPLES: usize = 6;
const MAX_SAMPLES: usize = 16;
/// Maximum factor between the round trip in a near page and in the nearest one.
const NEAR: f64 = 1.2;

/// Where the queues' memory is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Choice {
    /// Where lines go fast between the two CPUs, by measurement
    #[default]
    Near,
    /// Wherever the system puts it
    Any,
}

/// Memory for queues between two CPUs.
#[derive(Clone, Debug, Default)]
pub struct NearMemory {
    source: MemorySource,
    /// Round trips in nanoseconds of all pages measured so far.
    seen: Arc<Mutex<Vec<f64>>>,
}

impl NearMemory {
    /// Creates the memory source that the user chose.
    pub(super) fn new(choice: Choice, cores: &Cores) -> Self {
        let (Choice::Near, Some(&client), Some(&server)) =
            (choice, cores.client.first(), cores.server.first())
        else {
            return Self::default();
        };
        let seen = Arc::<Mutex<Vec<f64>>>::default();
        let source = {
            let seen = seen.clone();
            MemorySource::new(move |len| {
                let mut looked = Vec::new();
                let look = |memory: &Memory| {
                    let pages = pingpong::pages(client, server, memory, PAGES)?;
                    looked.extend_from_slice(&pages);
                    Ok(pages)
                };
                let chosen = choose(|| piece(len), look);
                let mut seen = seen.lock().unpoisoned();
                seen.append(&mut looked);
                chosen.or_else(|error| {
                    eprintln!("no memory near CPUs {client} and {server}: {error:#}");
                    Memory::anonymous(len)
                })
            })
        };
        Self { source, seen }
    }

    /// Returns the source of the memory.
    pub fn source(&self) -> MemorySource {
        self.source.clone()
    }

    /// Returns the round trip in nanoseconds in the farthest memory seen (the 95th percentile of
    /// all pages), if any was measured.
    pub fn farthest(&self) -> Option<f64> {
        let seen = self.seen.lock().unpoisoned();
        let mut seen = seen.clone();
        seen.sort_by(f64::total_cmp);
        seen.get(seen.len().saturating_sub(1) * 95 / 100).copied()
    }
}

/// Allocates a piece of memory with all pages present.
fn piece(len: usize) -> Result<Memory> {
    let memory = Memory::anonymous(len.max(PIECE))?;
    for at in (0..PIECE).step_by(pingpong::PAGE) {
        memory.write(at, &[0])?;
    }
    Ok(memory)
}

/// Returns the number of pages that are not near.
fn far(pages: &[f64], nearest: f64) -> usize {
    pages.iter().filter(|&&page| page > nearest * NEAR).count()
}

/// Returns the best of several pieces. `look` measures the distance of each page of a piece.
fn choose<T>(
    mut make: impl FnMut() -> Result<T>,
    mut look: impl FnMut(&T) -> Result<Vec<f64>>,
) -> Result<T> {
    // All pieces are kept until one is chosen: freed memory would be returned again.
    let mut pieces: Vec<(T, Vec<f64>)> = Vec::new();
    let mut nearest = f64::INFINITY;
    while pieces.len() < MAX_SAMPLES {
        let piece = make()?;
        let pages = look(&piece)?;
        nearest = pages.iter().copied().fold(nearest, f64::min);
        pieces.push((piece, pages));
        let found = pieces.iter().any(|(_, pages)| far(pages, nearest) == 0);
        if found && pieces.len() >= MIN_SAMPLES {
            break;
        }
    }
    let best = pieces
        .into_iter()
        .min_by_key(|(_, pages)| far(pages, nearest));
    Ok(best.context("no memory")?.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Chooses among pieces with pages of these distances. Returns the index of the piece, and the
    /// number of pieces made.
    fn chosen(pieces: &[[f64; 2]]) -> (usize, usize) {
        let mut made = 0;
        let make = || {
            made += 1;
            Ok(made - 1)
        };
        let piece = choose(make, |&piece: &usize| {
            Ok(pieces[piece % pieces.len()].to_vec())
        });
        (piece.unwrap(), made)
    }

    #[test]
    fn nearest_memory_piece_is_chosen() {
        let (near, far) = ([280.0, 300.0], [420.0, 430.0]);
        assert_eq!(chosen(&[far, far, near, far, far, far]), (2, MIN_SAMPLES));
        assert_eq!(chosen(&[near, near]), (0, MIN_SAMPLES), "all are alike");
        assert_eq!(chosen(&[far, far]), (0, MIN_SAMPLES), "all are alike");
        let late = [far, far, far, far, far, far, far, near];
        assert_eq!(
            chosen(&late),
            (0, MIN_SAMPLES),
            "nothing tells that it is far"
        );
        let mixed = [[280.0, 420.0], far, far, far, far, far, far, near];
        assert_eq!(chosen(&mixed), (7, 8), "until one is near throughout");
        assert_eq!(
            chosen(&[far, [290.0, 430.0], far]),
            (1, MAX_SAMPLES),
            "the best"
        );
    }

    #[test]
    fn failed_measurement_is_error() {
        assert!(choose(|| Ok(()), |()| anyhow::bail!("no")).is_err());
        assert!(choose(|| anyhow::bail!("no"), |(): &()| Ok(Vec::new())).is_err());
    }

    #[test]
    fn memory_is_found_for_every_place() {
        let cores = Cores::here().unwrap();
        let any = NearMemory::new(Choice::Any, &cores);
        assert_eq!(any.source().make(8192).unwrap().len(), 8192);
        assert_eq!(any.farthest(), None);
        let near = NearMemory::new(Choice::Near, &cores);
        let (small, large) = (near.source().make(1), near.source().make(PIECE + 4096));
        small.unwrap();
        assert!(large.unwrap().len() >= PIECE + 4096);
        assert_eq!(near.farthest().is_some(), !cores.server.is_empty());
        // A CPU that is not there: nothing can be measured.
        let nowhere = Cores {
            client: vec![0],
            server: vec![usize::MAX],
        };
        let memory = NearMemory::new(Choice::Near, &nowhere).source().make(4096);
        assert_eq!(memory.unwrap().len(), 4096);
    }
}
