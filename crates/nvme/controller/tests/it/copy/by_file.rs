//! Copies that the file system does, and what becomes of those that it does not do.

use super::{BACK, LIST, MIB, copy, copy_from, fill_namespace};
use crate::common::*;
use nvme::cmd::io::CopyCdw12;
use nvme::feature::{Fid, HostBehavior};
use nvme::{AdminOpcode, Command, NvmOpcode, Status};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use volume::{
    Completion, CopyRequest, CopySource, Effect, FastPath, Fault, FaultVolume, FileCopy,
    FileOptions, FileVolume, Info, Io, IoError, IoErrorKind, IoLimits, LimitVolume, Op, OpKind,
    OpenQueue, QueueState, RangeCopy, Rates, Request, Volume, VolumeError, VolumeQueue,
};
use zerocopy::IntoBytes;

/// Of Linux, on all architectures.
const EIO: i32 = 5;
const EXDEV: i32 = 18;

/// What the double does about a copy.
#[derive(Clone, Copy, Debug)]
enum Answer {
    /// The file system executes the copy.
    Execute,
    Fail(IoError),
    /// Nothing, until it is cancelled.
    Hold,
}

/// A volume on a file whose copies have answers that the test chooses; without one, the file
/// system's.
#[derive(Debug)]
struct Double {
    /// What reads and writes go through.
    volume: Arc<dyn Volume>,
    /// What copies go to.
    file: Arc<FileVolume>,
    answers: Arc<Mutex<VecDeque<Answer>>>,
    /// Those that were asked for: where, bytes, FUA.
    asked: Arc<Mutex<Vec<(u64, u64, bool)>>>,
}

struct DoubleQueue {
    queue: OpenQueue,
    file: OpenQueue,
    answers: Arc<Mutex<VecDeque<Answer>>>,
    asked: Arc<Mutex<Vec<(u64, u64, bool)>>>,
    failed: Vec<(u64, IoError)>,
    held: Vec<u64>,
}

impl Volume for Double {
    fn info(&self) -> Info {
        self.volume.info()
    }
    fn open(&self, io: &Io) -> Result<OpenQueue, VolumeError> {
        Ok(OpenQueue::with_fast_path(DoubleQueue {
            queue: self.volume.open(io)?,
            file: self.file.open(io)?,
            answers: self.answers.clone(),
            asked: self.asked.clone(),
            failed: Vec::new(),
            held: Vec::new(),
        }))
    }
    fn id(&self) -> Vec<u8> {
        self.volume.id()
    }
    fn inner(&self) -> Option<&dyn Volume> {
        None
    }
}

impl VolumeQueue for DoubleQueue {
    fn submit(&mut self, request: Request) -> Option<Completion> {
        self.queue.submit(request)
    }
    fn poll(&mut self, done: &mut dyn FnMut(Completion)) -> usize {
        let mut count = self.queue.poll(done) + self.file.poll(done);
        for (tag, error) in self.failed.drain(..) {
            count += 1;
            done(Completion {
                tag,
                result: Err(error),
                data: Default::default(),
            });
        }
        count
    }
    fn state(&self) -> QueueState {
        let own = self.failed.len() + self.held.len();
        let (queue, file) = (self.queue.state(), self.file.state());
        QueueState {
            in_flight: queue.in_flight + file.in_flight + own,
            ..queue
        }
    }
    fn cancel(&mut self, tag: u64) {
        self.queue.cancel(tag);
        self.file.cancel(tag);
        if self.held.contains(&tag) {
            self.held.retain(|held| *held != tag);
            self.failed.push((tag, IoErrorKind::Aborted.into()));
        }
    }
}

impl FastPath for DoubleQueue {
    fn start(
        &mut self,
        tag: u64,
        op: Op,
        offset: u64,
        data: dma::SegmentList,
    ) -> Option<Completion> {
        self.queue.start(tag, op, offset, data)
    }
    fn push(&mut self) {
        self.queue.push();
    }
    fn is_immediate(&self) -> bool {
        false
    }
    fn try_now(&mut self, _: Op, _: u64, _: dma::View<'_>) -> Option<Result<(), IoError>> {
        None
    }
    fn prefetches(&self) -> bool {
        false
    }
    fn prefetch(&mut self, _: Op, _: u64, _: u64) {}
    fn range_copy(&mut self) -> Option<&mut dyn RangeCopy> {
        Some(self)
    }
}

impl RangeCopy for DoubleQueue {
    fn copy_source(&mut self, offset: u64, len: u64) -> Option<CopySource> {
        self.file.copy_source(offset, len)
    }
    fn copy(&mut self, copy: CopyRequest) -> bool {
        let asked = (copy.offset, copy.source.len_bytes(), copy.fua);
        self.asked.lock().unwrap().push(asked);
        match self.answers.lock().unwrap().pop_front() {
            None | Some(Answer::Execute) => return self.file.copy(copy),
            Some(Answer::Fail(error)) => self.failed.push((copy.tag, error)),
            Some(Answer::Hold) => self.held.push(copy.tag),
        }
        true
    }
}

fn file(dir: &tempfile::TempDir, name: &str, bytes: u64) -> Arc<FileVolume> {
    let path = dir.path().join(name);
    std::fs::File::create(&path)
        .unwrap()
        .set_len(bytes)
        .unwrap();
    let options = FileOptions {
        copy: FileCopy::On,
        lock: false,
        ..FileOptions::default()
    };
    Arc::new(FileVolume::open(&path, options).unwrap())
}

/// Bytes that the file system has copied there.
fn copied(file: &FileVolume) -> u64 {
    let copied = file.copied();
    copied.reflinked + copied.copied
}

/// The host uses descriptors of format 2h.
fn use_cross(h: &mut Host) {
    let behavior = HostBehavior {
        cdfe: (1 << 2).into(),
        ..HostBehavior::default()
    };
    h.write(PAGE, behavior.as_bytes());
    let mut command = Command::new(AdminOpcode::SET_FEATURES.0, 0, 0);
    command.cdw10 = u32::from(Fid::HOST_BEHAVIOR_SUPPORT.0).into();
    command.set_prps(PAGE, 0);
    assert_eq!(plain(h.admin(command).status()), Status::SUCCESS);
}

fn across(h: &Host, to: u64, ranges: &[(u32, u64, u32)]) -> Command {
    let mut command = copy_from(h, to, ranges);
    command.cdw12 = (command.cdw12.get() | 2 << 8).into();
    command
}

/// Blocks of 512 bytes of namespace 1.
fn blocks(h: &mut Host, slba: u64, count: u32) -> Vec<u8> {
    let mut read = h.rw(NvmOpcode::READ, 1, slba, count, 0);
    h.prps(&mut read, BACK, u64::from(count) * 512, LIST);
    assert_eq!(h.io(read), Status::SUCCESS);
    h.read(BACK, count as usize * 512)
}

/// A controller with the double on a file as its namespace 1, of 8 MiB with a pattern in it.
struct World {
    h: Host,
    disk: Vec<u8>,
    file: Arc<FileVolume>,
    answers: Arc<Mutex<VecDeque<Answer>>>,
    asked: Arc<Mutex<Vec<(u64, u64, bool)>>>,
    faults: Arc<volume::Faults>,
    path: std::path::PathBuf,
    _dir: tempfile::TempDir,
}

impl World {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let file = file(&dir, "disk", 8 * MIB);
        let faulty = FaultVolume::new(file.clone());
        let faults = faulty.faults();
        let double = Double {
            volume: Arc::new(faulty),
            file: file.clone(),
            answers: Arc::default(),
            asked: Arc::default(),
        };
        let (answers, asked) = (double.answers.clone(), double.asked.clone());
        let other = self::file(&dir, "other", 8 * MIB);
        let all = vec![ns(1, Arc::new(double), 512), ns(2, other, 512)];
        let mut h = Host::ready_with(all);
        let disk = pattern(5, 8 << 20);
        fill_namespace(&mut h, 1, &disk);
        Self {
            h,
            disk,
            file,
            answers,
            asked,
            faults,
            path: dir.path().join("disk"),
            _dir: dir,
        }
    }

    fn answer(&self, answer: Answer) {
        self.answers.lock().unwrap().push_back(answer);
    }

    /// What was asked of the file system since the last call.
    fn asked(&self) -> Vec<(u64, u64, bool)> {
        std::mem::take(&mut self.asked.lock().unwrap())
    }

    /// Reads and writes of the volume fail.
    fn without_transfers(&self) {
        for op in [OpKind::Read, OpKind::Write] {
            let error = IoErrorKind::Gone.into();
            self.faults.add(Fault::always(op, Effect::Fail(error)));
        }
    }

    fn assert_is(&mut self) {
        self.faults.clear();
        assert!(super::whole(&mut self.h, 8 << 20) == self.disk);
        assert!(std::fs::read(&self.path).unwrap() == self.disk);
    }
}

/// Not one byte is read or written by the volume.
#[test]
fn copy_by_file_reads_and_writes_no_data() {
    let mut w = World::new();
    w.without_transfers();
    let mut command = copy(&w.h, 8192, &[(0, 2048), (4096, 128), (2048, 1000)]);
    let cdw12 = CopyCdw12::from_bits(command.cdw12.get()).with_fua(true);
    command.cdw12 = cdw12.into_bits().into();
    assert_eq!(w.h.io(command), Status::SUCCESS);
    let asked = [
        (4 * MIB, MIB, true),
        (5 * MIB, 65536, true),
        (5 * MIB + 65536, 512_000, true),
    ];
    assert_eq!(w.asked(), asked);
    assert_eq!(copied(&w.file), MIB + 65536 + 512_000);
    w.disk.copy_within(0..1 << 20, 4 << 20);
    w.disk.copy_within(2 << 20..(2 << 20) + 65536, 5 << 20);
    w.disk
        .copy_within(1 << 20..(1 << 20) + 512_000, (5 << 20) + 65536);
    w.assert_is();
}

/// Whatever the error is: the range is read and written then, and the outcome is the command's.
#[test]
fn copy_by_file_falls_back_to_read_and_write() {
    for error in [
        IoErrorKind::Unsupported.into(),
        IoErrorKind::NoSpace.into(),
        IoErrorKind::Truncated.into(),
        IoError::from_errno(EXDEV, true),
        IoError::from_errno(EIO, true),
    ] {
        let mut w = World::new();
        w.answer(Answer::Fail(error));
        let command = copy(&w.h, 8192, &[(0, 2048), (4096, 2048)]);
        assert_eq!(w.h.io(command), Status::SUCCESS, "{error}");
        assert_eq!(w.asked().len(), 2, "each range anew");
        assert_eq!(copied(&w.file), MIB);
        w.disk.copy_within(0..1 << 20, 4 << 20);
        w.disk.copy_within(2 << 20..3 << 20, 5 << 20);
        w.assert_is();
    }
    for (op, error, status) in [
        (
            OpKind::Write,
            IoErrorKind::NoSpace,
            Status::CAPACITY_EXCEEDED,
        ),
        (
            OpKind::Read,
            IoErrorKind::MediaRead,
            Status::UNRECOVERED_READ_ERROR,
        ),
        (OpKind::Write, IoErrorKind::MediaWrite, Status::WRITE_FAULT),
    ] {
        let mut w = World::new();
        w.faults.add(Fault::nth(op, 1, Effect::Fail(error.into())));
        let command = copy(&w.h, 8192, &[(0, 2048), (4096, 2048)]);
        w.answer(Answer::Execute);
        w.answer(Answer::Fail(IoErrorKind::NoSpace.into()));
        w.h.submit(1, command);
        w.h.until(|h| h.peek(1).is_some());
        let done = w.h.reap(1).unwrap();
        assert_eq!((plain(done.status()), done.dw0.get()), (status, 1));
    }
}

/// That is told once, and may be of other writes.
#[test]
fn copy_by_file_not_durable_is_write_fault() {
    let mut w = World::new();
    w.answer(Answer::Fail(IoErrorKind::NotDurable.into()));
    let command = copy(&w.h, 8192, &[(0, 2048)]);
    assert_eq!(plain(w.h.io(command)), Status::WRITE_FAULT);
}

/// Aborts a command that the file system is at.
fn abort(w: &mut World, command: Command) {
    let cid = w.h.submit(1, command);
    w.h.run();
    assert_eq!(w.asked().len(), 1);
    let mut abort = Command::new(AdminOpcode::ABORT.0, 0, 0);
    abort.cdw10 = (u32::from(cid) << 16 | 1).into();
    w.h.submit(0, abort);
    w.h.run();
    let done = w.h.reap(1).unwrap();
    assert_eq!(plain(done.status()), Status::ABORT_REQUESTED);
}

#[test]
fn copy_by_file_is_aborted_and_reset_in_file_system() {
    let mut w = World::new();
    w.answer(Answer::Hold);
    let command = copy(&w.h, 8192, &[(0, 2048)]);
    abort(&mut w, command);
    assert_eq!(w.h.reap(0).unwrap().dw0.get() & 1, 0, "it was aborted");
    w.answer(Answer::Hold);
    w.h.submit(1, command);
    w.h.run();
    w.h.disable();
    w.h.until(|h| !h.csts().rdy());
    w.h.enable();
    w.h.create_pair(1, 4);
    assert!(w.h.reap(1).is_none());
    w.assert_is();
    assert_eq!(w.h.io(command), Status::SUCCESS);
}

/// It is with the queue of the namespace that is written, whichever is read.
#[test]
fn cross_copy_by_file_is_aborted_at_target() {
    let mut w = World::new();
    use_cross(&mut w.h);
    w.answer(Answer::Hold);
    let command = across(&w.h, 8192, &[(2, 0, 2048)]);
    abort(&mut w, command);
    w.assert_is();
}

/// Really under way, and not to be seen how far.
#[test]
fn copy_by_file_is_repeated_by_next_process() {
    let mut w = World::new();
    for round in 0..8 {
        let from = round % 2 * 4096;
        let command = copy(&w.h, 8192, &[(from, 4096), (16000, 1), (from, 2048)]);
        w.h.submit(1, command);
        for _ in 0..round {
            w.h.round();
        }
        if w.h.peek(1).is_none() {
            w.h.die();
        }
        w.h.until(|h| h.peek(1).is_some());
        assert_eq!(w.h.reap(1).unwrap().status(), Status::SUCCESS);
        let (from, to) = (from as usize * 512, 4 << 20);
        w.disk.copy_within(from..from + (2 << 20), to);
        let one = 16000 * 512;
        w.disk.copy_within(one..one + 512, to + (2 << 20));
        w.disk
            .copy_within(from..from + (1 << 20), to + (2 << 20) + 512);
        w.assert_is();
    }
}

/// Blocks that Write Uncorrectable has marked are read by nobody; those before them are copied.
#[test]
fn copy_by_file_ends_at_marked_block() {
    let mut w = World::new();
    let mark = w.h.rw(NvmOpcode::WRITE_UNCORRECTABLE, 1, 1000, 1, 0);
    assert_eq!(w.h.io(mark), Status::SUCCESS);
    let command = copy(&w.h, 8192, &[(2048, 2048), (0, 2048)]);
    w.h.submit(1, command);
    w.h.until(|h| h.peek(1).is_some());
    let done = w.h.reap(1).unwrap();
    let status = Status::UNRECOVERED_READ_ERROR;
    assert_eq!((plain(done.status()), done.dw0.get()), (status, 1));
    assert_eq!(w.asked(), [(4 * MIB, MIB, false)]);
    // A destination is written, and readable then.
    let command = copy(&w.h, 512, &[(8192, 1024)]);
    assert_eq!(w.h.io(command), Status::SUCCESS);
    assert_eq!(w.asked().len(), 1);
    assert!(blocks(&mut w.h, 512, 1024) == w.disk[1 << 20..(1 << 20) + (512 << 10)]);
}

#[test]
fn cross_copy_works_with_and_without_files() {
    let dir = tempfile::tempdir().unwrap();
    let files = [1, 2].map(|n| file(&dir, &n.to_string(), 8 * MIB));
    let limited = LimitVolume::new(
        file(&dir, "limited", 8 * MIB),
        IoLimits {
            iops: Rates {
                total: 1 << 30,
                ..Rates::default()
            },
            ..IoLimits::default()
        },
    );
    let all = vec![
        ns(1, files[0].clone(), 512),
        ns(2, files[1].clone(), 512),
        ns(3, mem(8 * MIB), 512),
        ns(4, Arc::new(limited), 512),
    ];
    let mut h = Host::ready_with(all);
    use_cross(&mut h);
    let data = [2, 3, 4].map(|nsid| {
        let data = pattern(u64::from(nsid), 8 << 20);
        fill_namespace(&mut h, nsid, &data);
        data
    });
    let ranges = [
        (2, 0, 2048),
        (3, 8, 2048),
        (2, 7, 100),
        (4, 0, 512),
        (2, 4000, 200),
    ];
    let command = across(&h, 1024, &ranges);
    assert_eq!(h.io(command), Status::SUCCESS);
    let mut at = 1024;
    for (nsid, slba, count) in ranges {
        let wanted = &data[nsid as usize - 2][slba as usize * 512..][..count as usize * 512];
        assert!(blocks(&mut h, at, count) == wanted, "{nsid} {slba}");
        at += u64::from(count);
    }
    assert_eq!(copied(&files[0]), MIB + 200 * 512, "long ranges of 2");
    assert_eq!(copied(&files[1]), 0);
}

/// It may become shorter at any time.
#[test]
fn copy_from_truncated_source_fails() {
    let dir = tempfile::tempdir().unwrap();
    let files = [1, 2].map(|n| file(&dir, &n.to_string(), 8 * MIB));
    let all = vec![ns(1, files[0].clone(), 512), ns(2, files[1].clone(), 512)];
    let mut h = Host::ready_with(all);
    use_cross(&mut h);
    let data = pattern(1, 8 << 20);
    fill_namespace(&mut h, 2, &data);
    let path = dir.path().join("2");
    let backing = std::fs::File::options().write(true).open(path).unwrap();
    backing.set_len(4 * MIB).unwrap();
    let command = across(&h, 0, &[(2, 0, 2048), (2, 8000, 1000)]);
    h.submit(1, command);
    h.until(|h| h.peek(1).is_some());
    let done = h.reap(1).unwrap();
    let status = Status::UNRECOVERED_READ_ERROR;
    assert_eq!((plain(done.status()), done.dw0.get()), (status, 1));
    assert!(blocks(&mut h, 0, 2048) == data[..1 << 20]);
    assert_eq!(copied(&files[0]), MIB);
}
