use super::*;
use dma::SegmentList;

const FUA_ZEROES: Op = Op::WriteZeroes {
    deallocate: false,
    fua: true,
};

fn request(op: Op, len: u64) -> Request {
    let data = if op.has_data() {
        SegmentList::owned(Buffer::new(len as usize))
    } else {
        SegmentList::new()
    };
    Request {
        tag: 1,
        op,
        offset: 0,
        len,
        data,
    }
}

fn job(op: Op, len: u64) -> RingJob {
    RingJob::new(request(op, len), 0, true, &Abilities::new(true, true))
}

fn failed(kind: IoErrorKind) -> Continuation {
    Continuation::Done(Err(kind.into()))
}

fn system(errno: i32, write: bool) -> Continuation {
    Continuation::Done(Err(IoError::from_errno(errno, write)))
}

#[test]
fn short_transfers_continue() {
    let can = Abilities::new(true, true);
    let mut job = job(Op::Write { fua: false }, 16384);
    assert_eq!(job.advance(4096, 1, &can), Continuation::Again);
    assert_eq!((job.done, job.left()), (4096, 12288));
    assert_eq!(job.advance(1, 1, &can), Continuation::Again);
    assert_eq!(job.left(), 12287);
    assert_eq!(job.advance(12287, 1, &can), Continuation::Done(Ok(())));
}

#[test]
fn direct_transfers_continue_at_block() {
    let can = Abilities::new(true, true);
    let mut job = job(Op::Read, 8192);
    assert_eq!(job.advance(5000, 512, &can), Continuation::Again);
    assert_eq!(job.done, 4608);
    // The end of a file that shrank, within a block: no progress at a whole block, so it is the
    // end.
    assert_eq!(job.advance(392, 512, &can), failed(IoErrorKind::Truncated));
}

#[test]
fn empty_transfer_is_end() {
    let can = Abilities::new(true, true);
    assert_eq!(
        job(Op::Read, 4096).advance(0, 1, &can),
        failed(IoErrorKind::Truncated)
    );
    assert_eq!(
        job(Op::Write { fua: false }, 4096).advance(0, 1, &can),
        failed(IoErrorKind::MediaWrite)
    );
    // More than asked for is not believed.
    assert_eq!(
        job(Op::Read, 4096).advance(i32::MAX, 1, &can),
        Continuation::Done(Ok(()))
    );
}

#[test]
fn interrupted_calls_are_repeated_limited_times() {
    let can = Abilities::new(true, true);
    for errno in [libc::EINTR, libc::EAGAIN] {
        let mut job = job(Op::Flush, 0);
        for _ in 0..MAX_RETRIES {
            assert_eq!(job.advance(-errno, 1, &can), Continuation::Again);
        }
        let error = IoError::of_sync(errno);
        assert_eq!(job.advance(-errno, 1, &can), Continuation::Done(Err(error)));
    }
    // A cancelled request is not taken up again, but one that got through has got through.
    let mut job = job(Op::Read, 4096);
    job.cancelled = true;
    assert_eq!(
        job.advance(-libc::EINTR, 1, &can),
        failed(IoErrorKind::Aborted)
    );
    assert_eq!(job.advance(4096, 1, &can), Continuation::Done(Ok(())));
}

#[test]
fn refused_alignment_is_bounced_once() {
    let can = Abilities::new(true, true);
    let mut job = job(Op::Read, 4096);
    assert_eq!(job.advance(-libc::EINVAL, 512, &can), Continuation::Again);
    assert_eq!(job.step, KernelOp::Bounce);
    assert_eq!(
        job.advance(-libc::EINVAL, 512, &can),
        system(libc::EINVAL, false)
    );
}

#[test]
fn unsupported_zeroing_falls_back_stepwise() {
    let can = Abilities::new(true, true);
    let zeroes = Op::WriteZeroes {
        deallocate: true,
        fua: true,
    };
    let mut job = job(zeroes, 4096);
    assert_eq!(job.step, KernelOp::Punch);
    assert_eq!(
        job.advance(-libc::EOPNOTSUPP, 512, &can),
        Continuation::Again
    );
    assert_eq!(job.step, KernelOp::ZeroRange);
    assert_eq!(
        job.advance(-libc::EOPNOTSUPP, 512, &can),
        Continuation::Again
    );
    assert_eq!(job.step, KernelOp::Zeroes);
    assert_eq!(job.advance(4096, 512, &can), Continuation::Again);
    assert_eq!(job.step, KernelOp::Sync);
    assert_eq!(job.advance(0, 512, &can), Continuation::Done(Ok(())));
    assert!(!can.punch() && !can.zero_range());
    assert_eq!(
        RingJob::new(request(zeroes, 4096), 0, true, &can).step,
        KernelOp::Zeroes
    );
    let mut deallocate = RingJob::new(request(Op::Deallocate, 4096), 0, true, &can);
    assert_eq!(
        deallocate.advance(-libc::EOPNOTSUPP, 512, &can),
        system(libc::EOPNOTSUPP, true)
    );
}

#[test]
fn durable_zeroes_are_flushed() {
    let can = Abilities::new(true, true);
    let mut durable = job(FUA_ZEROES, 4096);
    assert_eq!(durable.step, KernelOp::ZeroRange);
    assert_eq!(durable.advance(0, 512, &can), Continuation::Again);
    assert_eq!(durable.step, KernelOp::Sync);
    assert_eq!(
        durable.advance(-libc::EIO, 512, &can),
        Continuation::Done(Err(IoError::of_sync(libc::EIO)))
    );
    let mut plain = job(
        Op::WriteZeroes {
            deallocate: false,
            fua: false,
        },
        4096,
    );
    assert_eq!(plain.advance(0, 512, &can), Continuation::Done(Ok(())));
}

#[test]
fn errors_keep_errno_and_get_kind() {
    let can = Abilities::new(true, true);
    for (errno, op, kind) in [
        (libc::EIO, Op::Read, IoErrorKind::MediaRead),
        (libc::EIO, Op::Write { fua: false }, IoErrorKind::MediaWrite),
        (libc::EIO, Op::Write { fua: true }, IoErrorKind::NotDurable),
        (libc::EIO, Op::Flush, IoErrorKind::NotDurable),
        (libc::ENOSPC, Op::Flush, IoErrorKind::NotDurable),
        // Past the page cache nothing else is lost.
        (libc::ENOSPC, Op::Write { fua: true }, IoErrorKind::NoSpace),
        (libc::ENOSPC, Op::Write { fua: false }, IoErrorKind::NoSpace),
        (libc::EDQUOT, FUA_ZEROES, IoErrorKind::NoSpace),
        (libc::EROFS, Op::Write { fua: false }, IoErrorKind::ReadOnly),
        (libc::ENODEV, Op::Read, IoErrorKind::Gone),
        (libc::EFAULT, Op::Read, IoErrorKind::Memory),
        (libc::ECANCELED, Op::Read, IoErrorKind::Aborted),
    ] {
        let error = Continuation::Done(Err(IoError { kind, errno }));
        assert_eq!(job(op, 4096).advance(-errno, 512, &can), error, "{op:?}");
    }
    let durable = job(Op::Write { fua: true }, 4096).advance(-libc::ENOSPC, 1, &can);
    let kind = IoErrorKind::NotDurable;
    let errno = libc::ENOSPC;
    assert_eq!(durable, Continuation::Done(Err(IoError { kind, errno })));
    // The most negative number has no positive counterpart.
    assert!(matches!(
        job(Op::Read, 4096).advance(i32::MIN, 1, &can),
        Continuation::Done(Err(_))
    ));
}

#[test]
fn bounced_reads_arrive_in_pieces() {
    let can = Abilities::new(true, true);
    let mut job = RingJob::new(request(Op::Read, 10000), 0, false, &can);
    assert_eq!(job.step, KernelOp::Bounce);
    job.bounce = Some(Buffer::new(4096));
    for (expected, byte) in [(4096, 1), (4096, 2), (1808, 3)] {
        let len = job.load_bounce();
        assert_eq!(len, Some(expected));
        if let Some(bounce) = &mut job.bounce {
            bounce.fill(byte);
        }
        job.advance(expected as i32, 16, &can);
    }
    let mut data = vec![0; 10000];
    job.request.data.copy_to(0, &mut data);
    assert_eq!(data, [vec![1; 4096], vec![2; 4096], vec![3; 1808]].concat());
    assert_eq!(job.left(), 0);
}

fn atomic(segments: u64, reachable: bool) -> (RingJob, Abilities) {
    let promise = AtomicWrites::naturally_aligned(4096, 16384);
    let can = Abilities::new(true, true).atomic(promise);
    let memory = dma::Memory::anonymous(16384).unwrap();
    let mut map = dma::DmaMap::new();
    let prot = dma::Prot {
        read: true,
        write: true,
    };
    map.map(0, 16384, Some((memory, 0)), prot).unwrap();
    let mut data = SegmentList::new();
    data.begin(&map);
    for place in 0..segments {
        // With a page between them.
        let (at, len) = (8192 * place, 8192 / segments);
        map.segments(at, len, dma::Access::Write, &mut data)
            .unwrap();
    }
    let request = Request::transfer(1, Op::Write { fua: false }, 8192, data);
    (RingJob::new(request, 0, reachable, &can), can)
}

#[test]
fn atomic_write_is_one_operation_or_fails() {
    let (mut whole, can) = atomic(1, true);
    assert!(whole.atomic && whole.step == KernelOp::Data);
    // The rest would be another write.
    assert_eq!(
        whole.advance(4096, 512, &can),
        failed(IoErrorKind::MediaWrite)
    );
    let (mut again, can) = atomic(1, true);
    assert_eq!(again.advance(-libc::EAGAIN, 512, &can), Continuation::Again);
    assert_eq!(again.done, 0, "from its beginning");
    assert_eq!(again.advance(8192, 512, &can), Continuation::Done(Ok(())));
    // The kernel takes one piece of memory.
    assert_eq!(atomic(2, true).0.step, KernelOp::Bounce);
    assert_eq!(atomic(1, false).0.step, KernelOp::Bounce);
    // A kernel that does not do it is not asked for less.
    let (mut refused, can) = atomic(1, true);
    assert_eq!(
        refused.advance(-libc::EINVAL, 512, &can),
        Continuation::Again
    );
    assert_eq!((refused.step, refused.atomic), (KernelOp::Bounce, true));
    assert_eq!(
        refused.advance(-libc::EOPNOTSUPP, 512, &can),
        system(libc::EOPNOTSUPP, true)
    );
    // All other operations are not atomic.
    let can = Abilities::new(true, true).atomic(AtomicWrites::naturally_aligned(4096, 16384));
    for (op, len) in [
        (Op::Read, 8192),
        (Op::Write { fua: false }, 12288),
        (Op::Write { fua: true }, 32768),
    ] {
        assert!(!RingJob::new(request(op, len), 0, true, &can).atomic);
    }
}
