//! The client against the server, and against servers that misbehave.

use crate::common::*;
use std::os::fd::AsFd;
use std::time::Duration;
use vfio_user::client::{self, Client, ClientError, RawClient};
use vfio_user::wire::{self, Command, flags};
use vfio_user::{
    Connection, ConnectionStatus, DmaUnmapping, Errno, Interest, IrqAction, Listener, MmapArea,
    RegionInfo,
};
use zerocopy::IntoBytes;

const TIMEOUT: Duration = Duration::from_secs(20);

/// Serves one client of `listener` until it leaves; returns the device.
fn serve(listener: Listener, mut device: Mock) -> std::thread::JoinHandle<Mock> {
    use rustix::event::{PollFd, PollFlags, poll};
    std::thread::spawn(move || {
        poll(&mut [PollFd::new(&listener, PollFlags::IN)], None).unwrap();
        let mut connection = Connection::new(listener.accept().unwrap().unwrap());
        loop {
            let flags = match connection.interest() {
                Interest::Readable => PollFlags::IN,
                Interest::Writable => PollFlags::OUT,
                Interest::None => PollFlags::empty(),
            };
            if !flags.is_empty() {
                poll(&mut [PollFd::new(&connection, flags)], None).unwrap();
            }
            let mut status = match connection.on_ready(&mut device).unwrap() {
                ConnectionStatus::Pending => connection.complete(&mut device, Ok(())).unwrap(),
                status => status,
            };
            // What was read already makes the socket readable no more.
            while status == ConnectionStatus::MoreWork {
                status = connection.on_ready(&mut device).unwrap();
            }
            if status == ConnectionStatus::Closed {
                return device;
            }
        }
    })
}

fn set_up(device: Mock) -> (Client, std::thread::JoinHandle<Mock>, tempfile::TempDir) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("cntrl");
    let server = serve(Listener::bind(&path).unwrap(), device);
    (Client::connect(&path, TIMEOUT).unwrap(), server, dir)
}

#[test]
fn client_works_with_server() {
    let mut device = Mock {
        defer: true,
        ..Mock::default()
    };
    let doorbells = memfd();
    let doorbells_id = file_id(&doorbells);
    device.mmap = Some((
        doorbells,
        0x2000,
        vec![MmapArea {
            offset: 0x1000,
            size: 0x1000,
        }],
    ));
    let (mut client, server, _dir) = set_up(device);

    assert_eq!(client.server_capabilities().max_msg_fds, 16);
    assert!(client.server_capabilities().write_multiple);
    let info = client.device_info().unwrap();
    assert!(info.pci && info.reset && (info.num_regions, info.num_irqs) == (9, 5));

    let bar = client.region_info(BAR0).unwrap();
    assert_eq!((bar.size, bar.read, bar.write), (BAR0_SIZE, true, true));
    let mmap = bar.mmap.unwrap();
    assert_eq!((file_id(&mmap.fd), mmap.offset), (doorbells_id, 0x2000));
    assert_eq!(
        mmap.areas,
        [MmapArea {
            offset: 0x1000,
            size: 0x1000
        }]
    );
    assert!(client.region_info(CONFIG).unwrap().mmap.is_none());
    assert_eq!(client.region_info(8).unwrap().size, 0);
    assert!(matches!(
        client.region_info(9),
        Err(ClientError::Refused {
            errno: Some(Errno::INVAL),
            ..
        })
    ));
    let msix = client.irq_info(MSIX).unwrap();
    assert!(msix.count == 33 && msix.eventfd && msix.noresize && !msix.maskable);

    let ram = memfd();
    client.dma_map(mapping(0x10000), Some(ram.as_fd())).unwrap();
    client.dma_map(mapping(0x20000), None).unwrap();

    let mut data = [0; 64];
    client.region_read(CONFIG, 0x40, &mut data).unwrap();
    assert!(
        data.iter()
            .enumerate()
            .all(|(i, byte)| *byte == pattern(CONFIG, 0x40 + i as u64))
    );
    let mut large = vec![0; 1 << 20];
    client.region_read(2, 0, &mut large).unwrap();
    assert_eq!(large[12345], pattern(2, 12345));
    let mut too_large = vec![0; (1 << 20) + 1];
    assert!(matches!(
        client.region_read(2, 0, &mut too_large),
        Err(ClientError::TooLong { .. })
    ));

    client.region_write(BAR0, 0x14, &[1, 2, 3, 4]).unwrap();
    client
        .region_write_posted(BAR0, 0x1000, &[5, 0, 0, 0])
        .unwrap();
    client.region_write_posted(BAR0, BAR0_SIZE, &[6]).unwrap();

    let files: Vec<_> = (0..20).map(|_| memfd()).collect();
    let mut eventfds: Vec<_> = files.iter().map(|file| Some(file.as_fd())).collect();
    eventfds.extend([None, None]);
    client
        .set_irqs(
            MSIX,
            1,
            IrqAction::Trigger,
            client::Irqs::Eventfds(&eventfds),
        )
        .unwrap();
    client
        .set_irqs(
            MSIX,
            0,
            IrqAction::Mask,
            client::Irqs::Chosen(&[true, false]),
        )
        .unwrap();
    client
        .set_irqs(MSIX, 0, IrqAction::Trigger, client::Irqs::All(0))
        .unwrap();

    // These the device finishes later.
    client
        .dma_unmap(DmaUnmapping::Range {
            iova: 0x10000,
            size: 0x2000,
        })
        .unwrap();
    client.dma_unmap(DmaUnmapping::All).unwrap();
    client.reset().unwrap();
    drop(client);

    let calls = server.join().unwrap().calls;
    let ids = |range: std::ops::Range<usize>| {
        Irqs::Eventfd(
            files[range]
                .iter()
                .map(|file| Some(file_id(file)))
                .collect(),
        )
    };
    let irqs = |start, count, action, data| Call::SetIrqs {
        index: MSIX,
        start,
        count,
        action,
        data,
    };
    let expected = [
        Call::Map {
            map: mapping(0x10000),
            fd: Some(file_id(&ram)),
        },
        Call::Map {
            map: mapping(0x20000),
            fd: None,
        },
        Call::Read {
            index: CONFIG,
            offset: 0x40,
            count: 64,
        },
        Call::Read {
            index: 2,
            offset: 0,
            count: 1 << 20,
        },
        Call::Write {
            index: BAR0,
            offset: 0x14,
            data: vec![1, 2, 3, 4],
        },
        Call::Write {
            index: BAR0,
            offset: 0x1000,
            data: vec![5, 0, 0, 0],
        },
        irqs(1, 16, IrqAction::Trigger, ids(0..16)),
        irqs(17, 4, IrqAction::Trigger, ids(16..20)),
        irqs(21, 2, IrqAction::Trigger, Irqs::Eventfd(vec![None, None])),
        irqs(0, 2, IrqAction::Mask, Irqs::Bool(vec![true, false])),
        irqs(0, 0, IrqAction::Trigger, Irqs::None),
        Call::Unmap(DmaUnmapping::Range {
            iova: 0x10000,
            size: 0x2000,
        }),
        Call::Unmap(DmaUnmapping::All),
        Call::Reset,
        Call::Disconnected,
    ];
    assert_eq!(calls, expected);
}

#[test]
fn connect_without_server_is_error() {
    let dir = tempfile::tempdir().unwrap();
    let result = Client::connect(dir.path().join("nothing"), TIMEOUT);
    assert!(matches!(result, Err(ClientError::Connect(Errno::NOENT))));
}

/// A client, and the server's end as a raw socket. Answers are sent before they are asked for.
fn with_raw_server(timeout: Duration) -> (Client, RawClient) {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    let (a, b) = socketpair(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )
    .unwrap();
    (
        Client::new(RawClient::from_fd(a, timeout).unwrap()),
        RawClient::from_fd(b, TIMEOUT).unwrap(),
    )
}

#[test]
fn silent_server_times_out() {
    let (mut client, _server) = with_raw_server(Duration::from_millis(10));
    assert!(matches!(client.reset(), Err(ClientError::TimedOut)));
    assert!(matches!(client.reset(), Err(ClientError::Broken)));
}

#[test]
fn closed_server_breaks_client() {
    let (mut client, server) = with_raw_server(TIMEOUT);
    drop(server);
    assert!(matches!(client.reset(), Err(ClientError::Closed)));
    assert!(matches!(
        client.region_write_posted(0, 0, &[1]),
        Err(ClientError::Broken)
    ));
}

#[test]
fn unsolicited_errors_are_distinguished() {
    let (mut client, mut server) = with_raw_server(TIMEOUT);
    client.region_write_posted(BAR0, 0x1000, &[1]).unwrap();
    let mut error = message(0, Command::REGION_WRITE, flags::REPLY | flags::ERROR, &[]);
    error[12] = Errno::IO.raw_os_error() as u8;
    server.send(&error, &[]).unwrap();
    let result = client.reset();
    let expected = matches!(
        result,
        Err(ClientError::Unsolicited {
            command: Command::REGION_WRITE,
            errno: Some(Errno::IO)
        })
    );
    assert!(expected, "{result:?}");
}

#[test]
fn commands_from_server_are_refused_and_skipped() {
    let (mut client, mut server) = with_raw_server(TIMEOUT);
    server
        .send(&message(77, Command::DMA_READ, 0, &[&[0; 16]]), &[])
        .unwrap();
    server
        .send(&message(0, Command::DEVICE_RESET, flags::REPLY, &[]), &[])
        .unwrap();
    client.reset().unwrap();
    assert_eq!(server.recv().unwrap().header.command, Command::DEVICE_RESET);
    let refusal = server.recv().unwrap().header;
    assert_eq!(
        (refusal.message_id, refusal.flags),
        (77, flags::REPLY | flags::ERROR)
    );
    assert_eq!(refusal.error, Errno::NOTSUP.raw_os_error() as u32);
}

#[test]
fn malformed_answers_are_errors() {
    type Ask = fn(&mut Client) -> Result<(), ClientError>;
    let info = |flags, cap_offset, size| wire::RegionInfo {
        argsz: 32,
        flags,
        index: 0,
        cap_offset,
        size,
        offset: 0,
    };
    let region: Ask = |client| client.region_info(0).map(drop);
    let read: Ask = |client| client.region_read(0, 0, &mut [0; 4]);
    let (region_info, region_read) = (Command::DEVICE_GET_REGION_INFO, Command::REGION_READ);
    let access = |count| wire::RegionAccess {
        offset: 0,
        region: 0,
        count,
    };
    let cap = wire::CapHeader {
        id: 9,
        version: 1,
        next: 32,
    };
    let sparse = wire::CapHeader {
        id: 1,
        version: 1,
        next: 0,
    };
    let cases: Vec<(Ask, Command, Vec<u8>, usize)> = vec![
        (
            |client| client.device_info().map(drop),
            Command::DEVICE_GET_INFO,
            vec![0; 15],
            0,
        ),
        (
            region,
            region_info,
            wire::RegionInfo {
                index: 1,
                ..info(0, 0, 0)
            }
            .as_bytes()
            .to_vec(),
            0,
        ),
        (
            region,
            region_info,
            wire::RegionInfo {
                argsz: u32::MAX,
                ..info(0, 0, 0)
            }
            .as_bytes()
            .to_vec(),
            0,
        ),
        // Mappable without descriptor, and the other way round.
        (region, region_info, info(7, 0, 4096).as_bytes().to_vec(), 0),
        (region, region_info, info(7, 0, 4096).as_bytes().to_vec(), 2),
        (region, region_info, info(3, 0, 4096).as_bytes().to_vec(), 1),
        // Capabilities outside of the reply, in a circle, with more areas than there
        // are, with an area outside.
        (
            region,
            region_info,
            info(0xf, 1000, 4096).as_bytes().to_vec(),
            1,
        ),
        (
            region,
            region_info,
            info(0xf, u32::MAX, 4096).as_bytes().to_vec(),
            1,
        ),
        (
            region,
            region_info,
            info(0xf, 8, 4096).as_bytes().to_vec(),
            1,
        ),
        (
            region,
            region_info,
            [info(0xf, 32, 4096).as_bytes(), cap.as_bytes()].concat(),
            1,
        ),
        (
            region,
            region_info,
            [
                info(0xf, 32, 4096).as_bytes(),
                sparse.as_bytes(),
                &[0xff; 8],
            ]
            .concat(),
            1,
        ),
        (
            region,
            region_info,
            [
                info(0xf, 32, 4096).as_bytes(),
                sparse.as_bytes(),
                &[1, 0, 0, 0, 0, 0, 0, 0],
                &[1; 16],
            ]
            .concat(),
            1,
        ),
        (read, region_read, access(4).as_bytes().to_vec(), 0),
        (
            read,
            region_read,
            [access(5).as_bytes(), &[0; 5]].concat(),
            0,
        ),
        (
            read,
            region_read,
            [access(4).as_bytes(), &[0; 4]].concat(),
            1,
        ),
        (
            |client| client.negotiate(),
            Command::VERSION,
            vec![1, 0, 0, 0],
            0,
        ),
        (
            |client| client.negotiate(),
            Command::VERSION,
            vec![0, 0, 1, 0],
            0,
        ),
        (
            |client| client.negotiate(),
            Command::VERSION,
            b"\0\0\0\0{".to_vec(),
            0,
        ),
    ];
    let file = memfd();
    for (i, (ask, command, payload, fds)) in cases.into_iter().enumerate() {
        let (mut client, mut server) = with_raw_server(TIMEOUT);
        let fds = vec![file.as_fd(); fds];
        server
            .send(&message(0, command, flags::REPLY, &[&payload]), &fds)
            .unwrap();
        let result = ask(&mut client);
        let expected = matches!(
            result,
            Err(ClientError::Malformed(_)
                | ClientError::Version { .. }
                | ClientError::Capabilities(_))
        );
        assert!(expected, "case {i}: {result:?}");
        assert!(
            matches!(ask(&mut client), Err(ClientError::Broken)),
            "case {i}"
        );
    }
    let (mut client, mut server) = with_raw_server(TIMEOUT);
    let mut short = message(0, Command::DEVICE_RESET, flags::REPLY, &[]);
    short[4] = 15;
    server.send(&short, &[]).unwrap();
    assert!(matches!(client.reset(), Err(ClientError::Malformed(_))));
}

#[test]
fn device_types_are_nameable() {
    // A compile-time check that what a device returns is public.
    fn region(_: Option<RegionInfo<'_>>) {}
    region(None);
}
