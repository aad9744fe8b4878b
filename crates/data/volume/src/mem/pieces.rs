//! Processing of long requests on memory in pieces.
//!
//! Zeroing and releasing memory needs only processor time, but a command may cover gigabytes. If a
//! worker did all of it within one call, its other clients would wait. Long requests therefore
//! continue in pieces, for [`QUANTUM`] in each round, and take turns. A request completes when all
//! of it is done. A concurrent read of its range sees old or new bytes, as with any two commands
//! that are outstanding together ("NVM Command Set 1.1", 2.1.4).

use crate::request::MAX_INLINE_BYTES;
use crate::{Completion, IoError, IoErrorKind, Op, Request};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Time that one round may spend on pieces of requests. At least one piece is processed.
const QUANTUM: Duration = Duration::from_micros(50);
/// Target duration of a piece. Pieces become shorter after a longer one, and longer after one that
/// took less than a quarter of this time.
const PIECE_TIME: Duration = Duration::from_micros(40);
/// Minimum length of a piece in bytes. The maximum is a huge page, which the kernel releases as a
/// whole; in small pages, that is 512 of them.
const MIN_PIECE: u64 = 32 << 10;
const MAX_PIECE: u64 = 2 << 20;
/// Length of a piece in bytes, before the duration of pieces was measured.
const INITIAL_PIECE: u64 = 256 << 10;

/// Request to a volume in memory of which a part remains.
#[derive(Debug)]
struct Unfinished {
    request: Request,
    /// Number of bytes of the request's range that are done.
    done: u64,
    cancelled: bool,
}

/// Length in bytes of pieces of one kind of work, adapted to their duration.
#[derive(Debug, Clone, Copy)]
struct Length(u64);

impl Length {
    /// Adapts the length after a piece of `len` bytes has taken the duration `time`.
    fn took(&mut self, len: u64, time: Duration) {
        if time > PIECE_TIME {
            self.0 = (self.0 / 2).max(MIN_PIECE);
        } else if time < PIECE_TIME / 4 && len == self.0 {
            self.0 = (self.0 * 2).min(MAX_PIECE);
        }
    }
}

/// Requests of one queue that are processed piece by piece, over several rounds.
#[derive(Debug)]
pub(super) struct Pieces {
    unfinished: VecDeque<Unfinished>,
    /// Number of bytes that requests without data have zeroed or released within their call since
    /// the last round.
    at_once: u64,
    /// Length of pieces that copy or zero memory.
    moved: Length,
    /// Length of pieces that return memory to the system.
    released: Length,
}

impl Pieces {
    pub(super) fn new() -> Self {
        Self {
            unfinished: VecDeque::new(),
            at_once: 0,
            moved: Length(INITIAL_PIECE),
            released: Length(INITIAL_PIECE),
        }
    }

    /// Returns the number of requests of which a part remains.
    pub(super) fn count(&self) -> usize {
        self.unfinished.len()
    }

    /// Returns whether a request may be executed immediately, within the call that submits it.
    /// Requests without data are counted together until the next round, because many short ones
    /// take as long as a long one.
    pub(super) fn admits(&mut self, request: &Request) -> bool {
        match request.op {
            Op::Flush => true,
            Op::Read | Op::Write { .. } => request.len <= MAX_INLINE_BYTES,
            Op::WriteZeroes { .. } | Op::Deallocate => {
                let sum = self.at_once.saturating_add(request.len);
                let admitted = sum <= MAX_INLINE_BYTES;
                if admitted {
                    // A request of no bytes takes a little, too.
                    self.at_once = sum.saturating_add(1);
                }
                admitted
            }
        }
    }

    /// Queues a request, which the next rounds process piece by piece.
    pub(super) fn push(&mut self, request: Request) {
        self.unfinished.push_back(Unfinished {
            request,
            done: 0,
            cancelled: false,
        });
    }

    /// Cancels the request with this tag, which then ends in the next round.
    pub(super) fn cancel(&mut self, tag: u64) {
        let mut all = self.unfinished.iter_mut();
        if let Some(one) = all.find(|one| one.request.tag == tag) {
            one.cancelled = true;
        }
    }

    /// Cancels all requests, which then end in the next round.
    pub(super) fn cancel_all(&mut self) {
        for one in &mut self.unfinished {
            one.cancelled = true;
        }
    }

    /// Runs a round. `work` is called with a request, the position in its range, and a number of
    /// bytes; `finished` with each completion. Returns the number of completions.
    pub(super) fn round(
        &mut self,
        mut work: impl FnMut(&Request, u64, u64) -> Result<(), IoError>,
        finished: &mut dyn FnMut(Completion),
    ) -> usize {
        self.at_once = 0;
        if self.unfinished.is_empty() {
            return 0;
        }
        let mut count = 0;
        let began = Instant::now();
        let mut before = began;
        while let Some(mut one) = self.unfinished.pop_front() {
            let length = match one.request.op {
                Op::Deallocate
                | Op::WriteZeroes {
                    deallocate: true, ..
                } => &mut self.released,
                _ => &mut self.moved,
            };
            let result = if one.cancelled {
                Err(IoErrorKind::Aborted.into())
            } else {
                let len = piece(&one, length.0);
                let result = work(&one.request, one.done, len);
                one.done += len;
                let now = Instant::now();
                length.took(len, now.saturating_duration_since(before));
                before = now;
                result
            };
            if result.is_err() || one.done >= one.request.len {
                count += 1;
                finished(one.request.complete(result));
            } else {
                self.unfinished.push_back(one);
            }
            if before.saturating_duration_since(began) >= QUANTUM {
                break;
            }
        }
        count
    }
}

/// Returns the length of the next piece of a request. A piece that reaches the end of a huge page
/// stops there, so that huge pages are released as a whole.
fn piece(one: &Unfinished, most: u64) -> u64 {
    let at = one.request.offset.saturating_add(one.done);
    let to_end = MAX_PIECE - at % MAX_PIECE;
    (one.request.len - one.done).min(most).min(to_end)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn request(tag: u64, op: Op, offset: u64, len: u64) -> Request {
        Request::without_data(tag, op, offset, len)
    }

    #[test]
    fn piece_length_follows_measured_time() {
        let mut length = Length(INITIAL_PIECE);
        for _ in 0..20 {
            length.took(length.0, PIECE_TIME * 2);
        }
        assert_eq!(length.0, MIN_PIECE);
        length.took(length.0 / 2, Duration::ZERO);
        assert_eq!(length.0, MIN_PIECE, "the rest of a request shows nothing");
        for _ in 0..20 {
            length.took(length.0, Duration::ZERO);
        }
        assert_eq!(length.0, MAX_PIECE);
        length.took(MAX_PIECE, PIECE_TIME);
        assert_eq!(length.0, MAX_PIECE, "neither short nor long");
    }

    #[test]
    fn pieces_cover_range_and_end_at_huge_pages() {
        let mut pieces = Pieces::new();
        let (offset, len) = (3 * 4096, 16 << 20);
        pieces.push(request(7, Op::Deallocate, offset, len));
        let (mut next, mut done) = (0, Vec::new());
        while pieces.count() > 0 {
            pieces.round(
                |request, at, len| {
                    assert_eq!((request.tag, at), (7, next));
                    assert!(len > 0 && len <= MAX_PIECE);
                    let (first, last) = (offset + at, offset + at + len - 1);
                    assert_eq!(first / MAX_PIECE, last / MAX_PIECE, "{at} {len}");
                    next += len;
                    Ok(())
                },
                &mut |completion| done.push((completion.tag, completion.result)),
            );
        }
        assert_eq!((next, done), (len, vec![(7, Ok(()))]));
    }

    #[test]
    fn requests_take_turns_within_bounded_round() {
        let mut pieces = Pieces::new();
        for tag in 0..3 {
            pieces.push(request(tag, Op::Deallocate, 0, GIB));
        }
        let mut turns = Vec::new();
        for _ in 0..3 {
            pieces.round(
                |request, _, _| {
                    turns.push(request.tag);
                    std::thread::sleep(QUANTUM);
                    Ok(())
                },
                &mut |_| panic!("nothing is finished"),
            );
        }
        assert_eq!(turns, [0, 1, 2], "one slow piece in each round");
        let zeroes = Op::WriteZeroes {
            deallocate: false,
            fua: false,
        };
        pieces.push(request(3, zeroes, 0, GIB));
        let mut ended = Vec::new();
        (0..4).for_each(|tag| pieces.cancel(tag));
        let count = pieces.round(
            |_, _, _| panic!("all of them are cancelled"),
            &mut |completion| ended.push((completion.tag, completion.result)),
        );
        let aborted = |tag| (tag, Err(IoErrorKind::Aborted.into()));
        assert_eq!((count, ended), (4, (0..4).map(aborted).collect()));
    }

    #[test]
    fn error_ends_request_in_pieces() {
        let mut pieces = Pieces::new();
        pieces.push(request(1, Op::Deallocate, 0, GIB));
        let mut ended = Vec::new();
        let failed = Err(IoErrorKind::Memory.into());
        pieces.round(|_, _, _| failed, &mut |done| ended.push(done.result));
        assert_eq!((pieces.count(), ended), (0, vec![failed]));
    }

    #[test]
    fn many_short_requests_count_like_long_one() {
        let mut pieces = Pieces::new();
        let short = request(0, Op::Deallocate, 0, 4096);
        let admitted = (0..1000).take_while(|_| pieces.admits(&short)).count();
        assert_eq!(admitted as u64, MAX_INLINE_BYTES / 4097);
        let nothing = pieces.round(|_, _, _| Ok(()), &mut |_| {});
        assert_eq!(nothing, 0);
        assert!(pieces.admits(&short), "a new round");
        assert!(pieces.admits(&request(0, Op::Flush, 0, 0)));
        assert!(pieces.admits(&request(0, Op::Read, 0, MAX_INLINE_BYTES)));
        assert!(!pieces.admits(&request(0, Op::Read, 0, MAX_INLINE_BYTES + 1)));
    }
}
