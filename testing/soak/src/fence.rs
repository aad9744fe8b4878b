//! A host that fences another one by Preempt and Abort, in turn with it, as nodes of a cluster do.
//! After the end of that command, no write of the fenced host may reach the disk.
//!
//! ```text
//! block 0     the turn, written by who holds the reservation: the other one reads it, and so
//!             knows that there is something to take
//! block 1..   one of each writer: who wrote it, in which turn, and how often
//! ```

use crate::Outcome;
use crate::passthrough::Namespace;
use nvme::cmd::reservation::{
    AcquireCdw10, AcquireData, Racqa, RegisterCdw10, RegisterData, ReleaseCdw10, ReleaseData,
    Rrega, Rrela, Rtype,
};
use nvme::{NvmOpcode, Status};
use rustix::io::{Errno, pread, pwrite};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

const BLOCK: usize = 4096;
const WRITERS: u64 = 4;
/// Number of writes in a turn before the other host may end it, so that some are outstanding when
/// it does.
const WRITES: u64 = 8;
/// Time limit for a step of the other host.
const HOST_TIMEOUT: Duration = Duration::from_secs(120);

/// Content of a written block: its writer, turn and count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Mark {
    host: u64,
    turn: u64,
    count: u64,
}

/// A block of the size and alignment that O_DIRECT wants.
struct Block {
    bytes: Vec<u8>,
    start: usize,
}

impl Block {
    fn new() -> Block {
        let bytes = vec![0; 2 * BLOCK];
        let start = bytes.as_ptr().align_offset(BLOCK);
        Block { bytes, start }
    }

    fn slice(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + BLOCK]
    }

    /// Reads a block; fails if its words differ, since the block was torn then.
    fn read(&mut self, namespace: &Namespace, number: u64) -> Outcome<Mark> {
        let bytes = self.slice();
        let got = pread(namespace.file(), &mut *bytes, number * BLOCK as u64)?;
        crate::ensure(got == BLOCK, format!("{got} bytes of block {number}"))?;
        let words: Vec<u64> = bytes
            .chunks_exact(8)
            .map(|word| u64::from_le_bytes(word.try_into().unwrap_or_default()))
            .collect();
        let mark = Mark {
            host: words[0],
            turn: words[1],
            count: words[2],
        };
        let whole = words
            .chunks(4)
            .all(|four| four == [mark.host, mark.turn, mark.count, 0]);
        crate::ensure(whole, format!("block {number} is torn: {mark:?}"))?;
        Ok(mark)
    }

    fn write(&mut self, namespace: &Namespace, number: u64, mark: Mark) -> Result<(), Errno> {
        let line = [mark.host, mark.turn, mark.count, 0].map(u64::to_le_bytes);
        for chunk in self.slice().chunks_exact_mut(32) {
            chunk.copy_from_slice(line.as_flattened());
        }
        pwrite(namespace.file(), self.slice(), number * BLOCK as u64).map(|_| ())
    }
}

/// Host 0 or 1.
struct Host {
    namespace: Namespace,
    number: u64,
    writes: AtomicU64,
}

fn key(host: u64) -> u64 {
    0x10 + host
}

/// `number` is 0 for the host that begins, 1 for the other; they end after so many turns.
pub fn run(device: &str, number: u64, turns: u64) -> Outcome {
    crate::ensure(number < 2, "the hosts are 0 and 1")?;
    let host = Host {
        namespace: Namespace::open(device, 1)?,
        number,
        writes: AtomicU64::new(0),
    };
    let other = 1 - number;
    let mut fences = 0u64;
    for turn in 0..turns {
        if turn % 2 == number {
            if turn == 0 {
                host.register(turn)?;
                host.acquire(Racqa::ACQUIRE, 0)?;
            } else {
                host.wait_for_writes(turn - 1, other)?;
                host.register(turn)?;
                host.is_shut_out(turn)?;
                host.acquire(Racqa::PREEMPT_AND_ABORT, key(other))?;
                host.is_quiet(turn)?;
                fences += 1;
            }
            host.hold(turn, turn + 1 == turns)?;
        }
    }
    let writes = host.writes.into_inner();
    println!("host {number}: {fences} fences, {writes} writes");
    Ok(())
}

impl Host {
    fn command<T>(&self, what: &str, opcode: NvmOpcode, cdw10: u32, data: &T) -> Outcome
    where
        T: zerocopy::FromBytes + zerocopy::IntoBytes + zerocopy::Immutable,
    {
        let status = self.namespace.command(opcode.into_bits(), cdw10, data)?;
        crate::ensure(
            status.is_success(),
            format!("host {}: {what}: {status}", self.number),
        )
    }

    /// Registers the host, whose registration the other host has removed before its turn begins.
    fn register(&self, turn: u64) -> Outcome {
        let data = RegisterData {
            nrkey: key(self.number).into(),
            ..RegisterData::default()
        };
        let cdw10 = RegisterCdw10::new().with_rrega(Rrega::REGISTER);
        let opcode = NvmOpcode::RESERVATION_REGISTER;
        self.command(&format!("register {turn}"), opcode, cdw10.into(), &data)
    }

    fn acquire(&self, action: Racqa, preempted: u64) -> Outcome {
        let data = AcquireData {
            crkey: key(self.number).into(),
            prkey: preempted.into(),
        };
        let cdw10 = AcquireCdw10::new()
            .with_racqa(action)
            .with_rtype(Rtype::WRITE_EXCLUSIVE);
        let opcode = NvmOpcode::RESERVATION_ACQUIRE;
        self.command("acquire", opcode, cdw10.into(), &data)
    }

    /// Neither its writes nor another reservation get past the one of the other host.
    fn is_shut_out(&self, turn: u64) -> Outcome {
        let mark = Mark {
            host: self.number,
            turn,
            count: u64::MAX,
        };
        let wrote = Block::new().write(&self.namespace, 1, mark);
        crate::ensure(
            wrote == Err(Errno::BADE),
            format!("turn {turn}: a write of the host without a reservation: {wrote:?}"),
        )?;
        let data = AcquireData {
            crkey: key(self.number).into(),
            ..AcquireData::default()
        };
        let cdw10 = AcquireCdw10::new().with_rtype(Rtype::WRITE_EXCLUSIVE);
        let opcode = NvmOpcode::RESERVATION_ACQUIRE.into_bits();
        let status = self.namespace.command(opcode, cdw10.into(), &data)?;
        crate::ensure(
            status.is(Status::RESERVATION_CONFLICT),
            format!("turn {turn}: a second reservation: {status}"),
        )
    }

    /// Checks that no block changes: the other host is fenced, and this one does not write yet.
    fn is_quiet(&self, turn: u64) -> Outcome {
        let mut block = Block::new();
        let mut all = || -> Outcome<Vec<Mark>> {
            (1..=WRITERS)
                .map(|number| block.read(&self.namespace, number))
                .collect()
        };
        let before = all()?;
        sleep(Duration::from_millis(2));
        let after = all()?;
        crate::ensure(
            before == after,
            format!("turn {turn}: written after the fence: {before:?}, {after:?}"),
        )
    }

    /// Until each writer of the other host has done some writes in its turn.
    fn wait_for_writes(&self, turn: u64, other: u64) -> Outcome {
        let mut block = Block::new();
        let end = Instant::now() + HOST_TIMEOUT;
        for number in 0..=WRITERS {
            loop {
                let mark = block.read(&self.namespace, number)?;
                let enough = number == 0 || mark.count >= WRITES;
                if mark.host == other && mark.turn == turn && enough {
                    break;
                }
                crate::ensure(
                    Instant::now() < end,
                    format!("turn {turn} of host {other} does not come: block {number}: {mark:?}"),
                )?;
                sleep(Duration::from_millis(1));
            }
        }
        Ok(())
    }

    /// Writes as holder of the reservation until the other host takes it; in the last turn releases
    /// it.
    fn hold(&self, turn: u64, is_last: bool) -> Outcome {
        let began = Instant::now();
        let fenced = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let writers: Vec<_> = (1..=WRITERS)
                .map(|number| {
                    let fenced = &fenced;
                    scope.spawn(move || {
                        let wrote = self.write_on(number, turn, is_last);
                        fenced.store(true, Ordering::Release);
                        wrote.map_err(|error| error.to_string())
                    })
                })
                .collect();
            let mark = Mark {
                host: self.number,
                turn,
                count: 0,
            };
            let told = Block::new().write(&self.namespace, 0, mark);
            for writer in writers {
                writer.join().map_err(|_| "a writer panicked")??;
            }
            crate::ensure(
                told.is_ok(),
                format!("turn {turn} cannot be told of: {told:?}"),
            )
        })?;
        if is_last {
            let data = ReleaseData {
                crkey: key(self.number).into(),
            };
            let cdw10 = ReleaseCdw10::new().with_rrela(Rrela::CLEAR);
            let opcode = NvmOpcode::RESERVATION_RELEASE;
            return self.command("clear", opcode, cdw10.into(), &data);
        }
        crate::ensure(
            began.elapsed() < HOST_TIMEOUT,
            format!("turn {turn} is not taken away"),
        )?;
        self.is_fenced(turn)
    }

    /// Runs one writer. Before each write it reads its previous one back, since no other writer
    /// uses the block in this turn.
    fn write_on(&self, number: u64, turn: u64, is_last: bool) -> Outcome {
        let mut block = Block::new();
        let end = Instant::now() + HOST_TIMEOUT;
        let mut last = None;
        for count in 1.. {
            let mark = Mark {
                host: self.number,
                turn,
                count,
            };
            if let Some(last) = last {
                let found = block.read(&self.namespace, number)?;
                // The fencing host has written there, so the next write of this host fails.
                let is_next = found.turn == turn + 1 && found.host != self.number;
                crate::ensure(
                    found == last || is_next,
                    format!("turn {turn}: block {number} has {found:?}, and not {last:?}"),
                )?;
            }
            match block.write(&self.namespace, number, mark) {
                Ok(()) => {}
                Err(Errno::BADE) => return Ok(()),
                Err(error) => return Err(format!("turn {turn}: a write: {error}").into()),
            }
            self.writes.fetch_add(1, Ordering::Relaxed);
            last = Some(mark);
            if is_last && count == WRITES {
                return Ok(());
            }
            crate::ensure(
                Instant::now() < end,
                format!("turn {turn} is not taken away"),
            )?;
        }
        Ok(())
    }

    /// Checks that writes of this host are refused, and that the other host's blocks stay: no
    /// outstanding write arrives after them.
    fn is_fenced(&self, turn: u64) -> Outcome {
        let mut block = Block::new();
        let mut seen = [0; WRITERS as usize];
        let end = Instant::now() + HOST_TIMEOUT;
        for round in 0.. {
            let mut all = true;
            for (number, seen) in (1..).zip(&mut seen) {
                let mark = block.read(&self.namespace, number)?;
                let is_new = mark.turn == turn + 1 && mark.host != self.number;
                // A mark of the old turn is valid only until the other host's first write.
                crate::ensure(
                    is_new || *seen == 0,
                    format!("turn {turn}: block {number} has {mark:?} again"),
                )?;
                if is_new {
                    *seen = mark.count;
                }
                all &= is_new && round > 0;
            }
            if all {
                return Ok(());
            }
            crate::ensure(
                Instant::now() < end,
                format!("turn {turn}: the other one has not written"),
            )?;
        }
        Ok(())
    }
}
