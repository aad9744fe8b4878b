//! Front-ends and guests that break the rules: they get errors or are disconnected, and the
//! next one finds all in order.

use crate::common::driver::SIZE;
use crate::common::raw::Raw;
use crate::common::*;
use dma::Memory;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use vhost::{VhostBackend, VringConfigData};
use vhost_blk::DiskOptions;
use volume::{Effect, Fault, FaultVolume, MemVolume, OpKind};

fn serve() -> Served {
    let volume = Arc::new(MemVolume::new(1 << 20).unwrap());
    let options = DiskOptions {
        queues: 4,
        ..DiskOptions::default()
    };
    Served::start(volume, options)
}

/// The server still serves.
fn works(served: &Served) {
    eventually("the last one has gone", || !served.stats.is_connected());
    let mut client = Client::connect(served, 0);
    let mut queue = client.queue(0);
    queue.ok(Req::write(1, &[1; 512]));
    assert_eq!(queue.ok(Req::read(1, 512)), [1; 512]);
}

const SET_FEATURES: u32 = 2;
const SET_OWNER: u32 = 3;
const SET_MEM_TABLE: u32 = 5;
const SET_VRING_NUM: u32 = 8;
const GET_VRING_BASE: u32 = 11;
const SET_VRING_KICK: u32 = 12;
const SET_PROTOCOL_FEATURES: u32 = 16;
const GET_QUEUE_NUM: u32 = 17;
const SET_BACKEND_REQ_FD: u32 = 21;
const GET_CONFIG: u32 = 24;
const SET_INFLIGHT_FD: u32 = 32;
const ADD_MEM_REG: u32 = 37;

#[test]
fn malformed_headers_end_connection() {
    let served = serve();
    for (what, bytes) in [
        ("no version", Raw::message(SET_OWNER, 0, &[])),
        ("version 2", Raw::message(SET_OWNER, 2, &[])),
        ("a reply", Raw::message(SET_OWNER, 5, &[])),
        ("unknown flag", Raw::message(SET_OWNER, 0x101, &[])),
        ("unknown request", Raw::message(99, 1, &[])),
        ("request 0", Raw::message(0, 1, &[])),
        (
            "long",
            [Raw::message(SET_OWNER, 1, &[])[..8].to_vec(), vec![0xff; 4]].concat(),
        ),
        ("longer than taken", Raw::message(SET_OWNER, 1, &[0; 4097])),
    ] {
        let mut raw = Raw::connect(&served);
        raw.bytes(&bytes, &[]);
        assert_eq!(raw.reply(), None, "{what}");
    }
    works(&served);
    served.stop();
}

#[test]
fn partial_message_blocks_only_its_sender() {
    let served = serve();
    let raw = Raw::connect(&served);
    raw.bytes(&Raw::message(SET_FEATURES, 1, &[0; 8])[..15], &[]);
    eventually("connected", || served.stats.is_connected());
    drop(raw);
    works(&served);
    // One that stays there does not keep the server from ending.
    let raw = Raw::connect(&served);
    raw.bytes(&[1, 0], &[]);
    eventually("connected", || served.stats.connections.get() >= 3);
    served.stop();
}

#[test]
fn messages_arrive_in_pieces_and_together() {
    let served = serve();
    let mut raw = Raw::connect(&served);
    for byte in Raw::message(1, 1, &[]) {
        raw.bytes(&[byte], &[]);
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    assert!(raw.reply().is_some());
    raw.bytes(&Raw::message(1, 1, &[]).repeat(100), &[]);
    for _ in 0..100 {
        assert_eq!(raw.reply().unwrap().len(), 8);
    }
    served.stop();
}

#[test]
fn descriptors_of_wrong_kind_or_number_are_refused() {
    let served = serve();
    let memfd = Memory::anonymous(0x10000).unwrap();
    let file = memfd.fd();
    let (pipe, _other) = rustix::pipe::pipe().unwrap();
    let pipe = pipe.as_fd();
    let region = |size: u64| -> Vec<u8> {
        [0u64, size, 0, 0]
            .iter()
            .flat_map(|v| v.to_ne_bytes())
            .collect()
    };
    let table = |count: u32, regions: &[Vec<u8>]| -> Vec<u8> {
        [&count.to_ne_bytes()[..], &[0; 4], &regions.concat()].concat()
    };
    let one = table(1, &[region(0x10000)]);
    let index = 0u64.to_ne_bytes();
    let inflight = {
        let mut bytes = 4096u64.to_ne_bytes().to_vec();
        bytes.extend(0u64.to_ne_bytes());
        bytes.extend(1u16.to_ne_bytes());
        bytes.extend(64u16.to_ne_bytes());
        bytes
    };
    let many: Vec<BorrowedFd<'_>> = vec![file; 33];
    let cases: Vec<(u32, Vec<u8>, Vec<BorrowedFd<'_>>)> = vec![
        (SET_MEM_TABLE, one.clone(), vec![]),
        (SET_MEM_TABLE, one.clone(), vec![file, file]),
        (SET_MEM_TABLE, one.clone(), vec![pipe]),
        (SET_MEM_TABLE, table(1, &[region(0x10001)]), vec![file]),
        (
            SET_MEM_TABLE,
            table(2, &[region(0x10000)]),
            vec![file, file],
        ),
        (
            SET_MEM_TABLE,
            table(u32::MAX, &[region(0x10000)]),
            vec![file],
        ),
        (SET_MEM_TABLE, one[..20].to_vec(), vec![file]),
        (SET_MEM_TABLE, one.clone(), many),
        (
            ADD_MEM_REG,
            [vec![0; 8], region(0x10000)].concat(),
            vec![pipe],
        ),
        (ADD_MEM_REG, [vec![0; 8], region(0x10000)].concat(), vec![]),
        (SET_VRING_KICK, index.to_vec(), vec![file]),
        (SET_VRING_KICK, index.to_vec(), vec![pipe]),
        (SET_VRING_KICK, index.to_vec(), vec![]),
        (SET_VRING_KICK + 1, index.to_vec(), vec![file]),
        (SET_VRING_KICK + 2, index.to_vec(), vec![file]),
        (SET_VRING_KICK + 1, 4u64.to_ne_bytes().to_vec(), vec![]),
        (SET_BACKEND_REQ_FD, vec![], vec![file]),
        (SET_BACKEND_REQ_FD, vec![], vec![]),
        (SET_INFLIGHT_FD, inflight.clone(), vec![pipe]),
        (SET_INFLIGHT_FD, inflight.clone(), vec![]),
        (SET_INFLIGHT_FD, inflight[..19].to_vec(), vec![file]),
    ];
    for (request, payload, fds) in cases {
        let mut raw = Raw::connect(&served);
        raw.send(SET_PROTOCOL_FEATURES, &0xb229u64.to_ne_bytes(), &[]);
        assert!(raw.ask(GET_QUEUE_NUM).is_some());
        raw.send(request, &payload, &fds);
        assert_eq!(raw.ask(1), None, "request {request} with {} fds", fds.len());
        eventually("gone", || !served.stats.is_connected());
    }
    works(&served);
    served.stop();
}

#[test]
fn unnegotiated_or_out_of_range_messages_are_refused() {
    let served = serve();
    let state = |index: u32, num: u32| [index.to_ne_bytes(), num.to_ne_bytes()].concat();
    let config = |offset: u32, size: u32| -> Vec<u8> {
        let mut bytes = [offset, size, 0]
            .iter()
            .flat_map(|v| v.to_ne_bytes())
            .collect::<Vec<_>>();
        bytes.resize(12 + (size as usize).min(512), 0);
        bytes
    };
    for (protocol, request, payload) in [
        (0u64, GET_QUEUE_NUM, vec![]),
        (0, GET_CONFIG, config(0, 60)),
        (0xb229, GET_CONFIG, config(200, 60)),
        (0xb229, GET_CONFIG, config(u32::MAX, 60)),
        (0xb229, GET_CONFIG, config(0, u32::MAX)),
        (0xb229, GET_CONFIG, vec![0; 5]),
        (0xb229, SET_VRING_NUM, state(0, 3)),
        (0xb229, SET_VRING_NUM, state(0, 0)),
        (0xb229, SET_VRING_NUM, state(0, 2048)),
        (0xb229, SET_VRING_NUM, state(4, 64)),
        (0xb229, SET_VRING_NUM, state(u32::MAX, 64)),
        (0xb229, GET_VRING_BASE, state(4, 0)),
        (0xb229, GET_VRING_BASE, vec![]),
        (0xb229, SET_FEATURES, u64::MAX.to_ne_bytes().to_vec()),
        (
            0xb229,
            SET_PROTOCOL_FEATURES,
            u64::MAX.to_ne_bytes().to_vec(),
        ),
    ] {
        let mut raw = Raw::connect(&served);
        raw.send(SET_PROTOCOL_FEATURES, &protocol.to_ne_bytes(), &[]);
        raw.send(request, &payload, &[]);
        assert_eq!(raw.reply(), None, "request {request}, {payload:?}");
        eventually("gone", || !served.stats.is_connected());
    }
    works(&served);
    served.stop();
}

/// Messages of all kinds, in any order, with anything in them.
#[test]
fn random_messages_do_not_break_server() {
    let served = serve();
    let memory = Memory::anonymous(0x10000).unwrap();
    let event = eventfd_owned();
    let mut random = pattern(0xfeed, 1 << 20).into_iter();
    let mut byte = || random.next().unwrap();
    for _ in 0..400 {
        let raw = Raw::connect(&served);
        raw.send(SET_PROTOCOL_FEATURES, &0xb229u64.to_ne_bytes(), &[]);
        for _ in 0..1 + byte() % 8 {
            let request = u32::from(byte() % 46);
            let len = [0, 8, 8, 8, 20, 24, 40, 40, 72][usize::from(byte() % 9)];
            // Small numbers mostly, so that some of them are right.
            let payload: Vec<u8> = (0..len)
                .map(|i| match (i % 8, byte() % 8) {
                    (0, value) => value % 4,
                    (_, 0) => byte(),
                    _ => 0,
                })
                .collect();
            let fds: Vec<BorrowedFd<'_>> = match byte() % 4 {
                0 => vec![memory.fd()],
                1 => vec![event.as_fd()],
                _ => vec![],
            };
            raw.bytes(
                &Raw::message(request, [1, 9][usize::from(byte() % 2)], &payload),
                &fds,
            );
        }
    }
    works(&served);
    served.stop();
}

fn eventfd_owned() -> std::os::fd::OwnedFd {
    rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap()
}

#[test]
fn ring_outside_guest_memory_is_refused() {
    let served = serve();
    let end = USER_BASE + MEMORY as u64;
    let good = VringConfigData {
        queue_max_size: SIZE,
        queue_size: SIZE,
        flags: 0,
        desc_table_addr: USER_BASE,
        used_ring_addr: USER_BASE + 0x2000,
        avail_ring_addr: USER_BASE + 0x1000,
        log_addr: None,
    };
    // 64 entries: 1024, 134 and 518 bytes.
    for bad in [
        VringConfigData {
            used_ring_addr: end - 516,
            ..good
        },
        VringConfigData {
            used_ring_addr: end,
            ..good
        },
        VringConfigData {
            used_ring_addr: USER_BASE - 4,
            ..good
        },
        VringConfigData {
            used_ring_addr: 0,
            ..good
        },
        VringConfigData {
            used_ring_addr: u64::MAX - 3,
            ..good
        },
        VringConfigData {
            avail_ring_addr: end - 132,
            ..good
        },
        VringConfigData {
            desc_table_addr: end - 1008,
            ..good
        },
        VringConfigData {
            desc_table_addr: USER_BASE + 4,
            ..good
        },
    ] {
        let client = Client::connect(&served, 0);
        client.frontend.set_vring_num(0, SIZE).unwrap();
        client.frontend.set_vring_base(0, 0).unwrap();
        client.frontend.set_vring_addr(0, &bad).unwrap();
        assert!(client.frontend.set_vring_kick(0, &eventfd()).is_err());
        drop(client);
        eventually("gone", || !served.stats.is_connected());
    }
    works(&served);
    served.stop();
}

/// A malformed chain is returned unanswered, with a used length of zero; the queue continues.
#[test]
fn malformed_chains_are_returned_unanswered() {
    const NEXT: u16 = 1;
    const WRITE: u16 = 2;
    const INDIRECT: u16 = 4;
    let served = serve();
    let mut client = Client::connect(&served, 0);
    let mut queue = client.queue(0);
    let table = queue.descriptors();
    let (at, outside) = (queue.slot(15), MEMORY as u64);
    queue.poke(at, &[0; 16]);
    let inner = at + 0x1000;
    type Chain = Vec<(u64, u32, u16, u16)>;
    let chains: Vec<(&str, Chain)> = vec![
        ("a loop of one", vec![(at, 16, NEXT, 0)]),
        ("a loop of two", vec![(at, 16, NEXT, 1), (at, 16, NEXT, 0)]),
        ("outside the table", vec![(at, 16, NEXT, SIZE)]),
        ("far outside the table", vec![(at, 16, NEXT, 0xffff)]),
        ("nothing to write to", vec![(at, 16, 0, 0)]),
        ("empty", vec![(at, 0, 0, 0)]),
        ("empty, writable", vec![(at, 0, WRITE, 0)]),
        (
            "readable after writable",
            vec![
                (at, 1, WRITE | NEXT, 1),
                (at, 16, NEXT, 2),
                (at, 1, WRITE, 0),
            ],
        ),
        ("indirect of odd size", vec![(inner, 17, INDIRECT, 0)]),
        ("indirect of no size", vec![(inner, 0, INDIRECT, 0)]),
        ("indirect of 4 GiB", vec![(inner, !15u32, INDIRECT, 0)]),
        (
            "indirect and next",
            vec![(inner, 16, INDIRECT | NEXT, 1), (at, 1, WRITE, 0)],
        ),
        ("indirect outside memory", vec![(outside, 16, INDIRECT, 0)]),
        (
            "indirect over the end",
            vec![(outside - 16, 32, INDIRECT, 0)],
        ),
        (
            "indirect at the end of the address space",
            vec![(u64::MAX - 15, 32, INDIRECT, 0)],
        ),
        (
            "status at the end of the address space",
            vec![(at, 16, NEXT, 1), (u64::MAX, 2, WRITE, 0)],
        ),
    ];
    let run = |queue: &mut Driver, what: &str, len: u32| {
        queue.offer(0);
        queue.kick();
        queue.sleep();
        assert_eq!(queue.used_entry(), Some((0, len)), "{what}");
    };
    for (what, chain) in chains {
        for (i, (addr, len, flags, next)) in chain.into_iter().enumerate() {
            queue.describe(table, i as u16, addr, len, flags, next);
        }
        run(&mut queue, what, 0);
    }
    // Inside an indirect table: a loop, another table, an index outside.
    for (what, flags, next) in [
        ("loop", NEXT, 0),
        ("nested", INDIRECT, 0),
        ("outside", NEXT, 2),
    ] {
        queue.describe(inner, 0, at, 16, flags, next);
        queue.describe(table, 0, inner, 32, INDIRECT, 0);
        run(&mut queue, what, 0);
    }
    // What can be answered is: the status says it.
    let status = at + 64;
    let answered: Vec<(&str, Chain)> = vec![
        (
            "short header",
            vec![(at, 15, NEXT, 1), (status, 1, WRITE, 0)],
        ),
        (
            "header outside",
            vec![(outside, 16, NEXT, 1), (status, 1, WRITE, 0)],
        ),
        (
            "data outside",
            vec![
                (at, 16, NEXT, 1),
                (outside, 512, WRITE | NEXT, 2),
                (status, 1, WRITE, 0),
            ],
        ),
        (
            "data over the end",
            vec![
                (at, 16, NEXT, 1),
                (outside - 256, 512, WRITE | NEXT, 2),
                (status, 1, WRITE, 0),
            ],
        ),
        (
            "data that wraps",
            vec![
                (at, 16, NEXT, 1),
                (u64::MAX - 255, 512, WRITE | NEXT, 2),
                (status, 1, WRITE, 0),
            ],
        ),
        (
            "data of 4 GiB",
            vec![
                (at, 16, NEXT, 1),
                (0, u32::MAX - 511, WRITE | NEXT, 2),
                (status, 1, WRITE, 0),
            ],
        ),
    ];
    for (what, chain) in answered {
        queue.poke(status, &[0xee]);
        for (i, (addr, len, flags, next)) in chain.into_iter().enumerate() {
            queue.describe(table, i as u16, addr, len, flags, next);
        }
        run(&mut queue, what, 1);
        assert_eq!(queue.peek(status, 1), [1], "{what}");
    }
    queue.ok(Req::read(0, 512));
    served.stop();
}

/// An index that no driver can have written: the queue stops for good, its error descriptor
/// says so, the others go on.
#[test]
fn broken_ring_stops_own_queue_only() {
    let served = serve();
    let mut client = Client::connect(&served, 0);
    let mut good = client.queue(1);
    for (what, index, head) in [
        ("index", 100u16, 0u16),
        ("head", 1, SIZE),
        ("head", 1, 0xffff),
    ] {
        let mut bad = client.queue(0);
        bad.poke(bad.available() + 4, &head.to_le_bytes());
        bad.poke(bad.available() + 2, &index.to_le_bytes());
        bad.kick();
        eventually("error", || bad.err.read().is_ok());
        good.ok(Req::read(0, 512));
        assert_eq!(bad.used_idx(), 0, "{what}");
        // It can be set up again.
        assert_eq!(client.frontend.get_vring_base(0).unwrap(), 0);
        bad.poke(bad.available() + 2, &0u16.to_le_bytes());
    }
    let mut again = client.queue(0);
    again.ok(Req::read(0, 512));
    served.stop();
}

/// The same head twice at once, more requests than there are entries, requests
/// that share all their memory.
#[test]
fn repeated_chain_is_answered_each_time() {
    let served = serve();
    let mut client = Client::connect(&served, 0);
    client.track(4, None);
    let mut queue = client.queue(0);
    let at = queue.slot(0);
    queue.poke(at, &[0; 16]);
    queue.describe(queue.descriptors(), 0, at, 16, 1, 1);
    queue.describe(queue.descriptors(), 1, at + 4096, 4096, 3, 2);
    queue.describe(queue.descriptors(), 2, at + 64, 1, 2, 0);
    for _ in 0..100 {
        for _ in 0..SIZE {
            queue.offer(0);
        }
        queue.kick();
        queue.wait_used(queue.next);
    }
    served.stop();
}

/// More than a queue has entries, all in flight at once: the rest waits, and nothing is lost.
#[test]
fn requests_beyond_queue_size_wait() {
    let volume = FaultVolume::new(Arc::new(MemVolume::new(1 << 20).unwrap()));
    let faults = volume.faults();
    faults.add(Fault::always(OpKind::Read, Effect::Hold));
    let served = Served::start(Arc::new(volume), DiskOptions::default());
    let mut client = Client::connect(&served, 0);
    let mut alive = client.queue(1);
    let mut queue = client.queue(0);
    queue.post(Req::read(0, 512));
    for _ in 1..SIZE {
        queue.offer(0);
    }
    queue.kick();
    eventually("held", || faults.held() == usize::from(SIZE));
    for _ in 0..SIZE {
        queue.offer(0);
    }
    queue.kick();
    at_the_queues(&mut alive);
    assert_eq!(faults.held(), usize::from(SIZE));
    faults.clear();
    faults.release();
    queue.wait_used(2 * SIZE);
    served.stop();
}

#[test]
fn shrunk_memory_file_ends_own_queues_only() {
    let served = serve();
    let memory = Memory::anonymous(MEMORY).unwrap();
    let mut client = Client::with_memory(&served, 0, memory.clone());
    let mut queue = client.queue(0);
    queue.ok(Req::write(0, &[1; 512]));
    let slot = queue.post(Req::read(0, 512));
    rustix::fs::ftruncate(memory.fd(), 0).unwrap();
    queue.kick();
    eventually("error", || queue.err.read().is_ok());
    drop((client, slot));
    works(&served);
    served.stop();
}
