use super::*;
use std::io::Cursor;

/// A server with scripted bytes; bytes sent to it are recorded.
struct Script {
    says: Cursor<Vec<u8>>,
    received: Vec<u8>,
}

impl Read for Script {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.says.read(buffer)
    }
}

impl Write for Script {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.received.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn greeting(flags: u16) -> Vec<u8> {
    let mut bytes = INIT_PASSWD.to_vec();
    bytes.extend(IHAVEOPT.to_be_bytes());
    bytes.extend(flags.to_be_bytes());
    bytes
}

fn reply_of(option: u32, kind: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = OPTION_REPLY.to_be_bytes().to_vec();
    bytes.extend(option.to_be_bytes());
    bytes.extend(kind.to_be_bytes());
    bytes.extend((data.len() as u32).to_be_bytes());
    bytes.extend(data);
    bytes
}

fn export_of(size: u64, flags: u16) -> Vec<u8> {
    let data = [&[0, 0][..], &size.to_be_bytes(), &flags.to_be_bytes()].concat();
    reply_of(option::GO, option_reply::INFO, &data)
}

fn blocks_of(sizes: [u32; 3]) -> Vec<u8> {
    let sizes = sizes.map(u32::to_be_bytes).concat();
    reply_of(
        option::GO,
        option_reply::INFO,
        &[&[0, 3][..], &sizes].concat(),
    )
}

fn ack(option: u32) -> Vec<u8> {
    reply_of(option, option_reply::ACK, &[])
}

fn ask(says: &[Vec<u8>]) -> (Result<Export, HandshakeError>, Vec<u8>) {
    let mut script = Script {
        says: Cursor::new(says.concat()),
        received: Vec::new(),
    };
    let export = negotiate(&mut script, "disk");
    (export, script.received)
}

#[test]
fn current_server_is_asked_for_all_features() {
    let (export, received) = ask(&[
        greeting(3),
        ack(option::STRUCTURED_REPLY),
        export_of(1 << 30, 0x16d),
        blocks_of([512, 4096, 1 << 20]),
        ack(option::GO),
    ]);
    let export = export.unwrap();
    assert_eq!(
        export,
        Export {
            size: 1 << 30,
            flags: 0x16d,
            minimum: 512,
            preferred: 4096,
            maximum: 1 << 20,
            structured: true
        }
    );
    assert!(export.has(export_flags::CAN_MULTI_CONN) && !export.has(export_flags::READ_ONLY));
    let expected = [
        &3u32.to_be_bytes()[..],
        b"IHAVEOPT\0\0\0\x08\0\0\0\0",
        b"IHAVEOPT\0\0\0\x07\0\0\0\x0c\0\0\0\x04disk\0\x01\0\x03",
    ];
    assert_eq!(received, expected.concat());
}

#[test]
fn older_server_is_asked_by_export_name() {
    let unsupported = |option| reply_of(option, option_reply::UNSUPPORTED, b"what?");
    let granted = [&(1u64 << 20).to_be_bytes()[..], &[0, 5], &[0; 124]].concat();
    let says = [
        greeting(1),
        unsupported(option::STRUCTURED_REPLY),
        unsupported(option::GO),
        granted,
    ];
    let export = ask(&says).0.unwrap();
    assert_eq!((export.size, export.structured), (1 << 20, false));
    assert_eq!((export.minimum, export.maximum), (512, 32 << 20));
    let error = ask(&says[..3]).0.unwrap_err().to_string();
    assert!(error.contains("no export \"disk\""), "{error}");
}

#[test]
fn handshake_refusals_are_reported() {
    let with = |kind, text: &[u8]| {
        let says = [
            greeting(3),
            ack(option::STRUCTURED_REPLY),
            reply_of(option::GO, kind, text),
        ];
        ask(&says).0.unwrap_err().to_string()
    };
    let text = with(option_reply::UNKNOWN, b"never known\x1b[2J");
    assert!(text.contains("no export \"disk\": never known"), "{text}");
    assert!(!text.contains('\x1b'), "{text}");
    assert!(with(option_reply::TLS_REQUIRED, b"").contains("demands TLS"));
    assert!(with(option_reply::POLICY, b"not you").contains("not you"));
    let tls = [
        greeting(3),
        reply_of(option::STRUCTURED_REPLY, option_reply::TLS_REQUIRED, b""),
    ];
    assert!(matches!(ask(&tls).0, Err(HandshakeError::Tls)));
}

#[test]
fn malformed_handshake_is_refused() {
    let error = |says: &[Vec<u8>]| ask(says).0.unwrap_err().to_string();
    assert!(error(&[b"HTTP/1.1 400 Bad Request\r\n".to_vec()]).contains("not an NBD server"));
    assert!(error(&[b"SSH-".to_vec()]).contains("ended early"));
    let old = [INIT_PASSWD.to_vec(), OLDSTYLE.to_be_bytes().to_vec()].concat();
    assert!(error(&[old]).contains("oldstyle"));
    assert!(error(&[greeting(0)]).contains("oldstyle or unfixed"));
    let asked = |replies: Vec<u8>| {
        let says = [greeting(3), ack(option::STRUCTURED_REPLY), replies];
        error(&says)
    };
    assert!(asked(ack(option::GO)).contains("not described"));
    assert!(asked(ack(option::STRUCTURED_REPLY)).contains("unexpected reply to an option"));
    let mut long = reply_of(option::GO, option_reply::INFO, &[]);
    long.splice(16..20, u32::MAX.to_be_bytes());
    assert!(asked(long).contains("too long"));
    let endless = reply_of(option::GO, option_reply::INFO, &[0, 9]).repeat(1000);
    assert!(asked(endless).contains("without end"));
    let whole = |export: Vec<u8>, blocks: [u32; 3]| {
        asked([export, blocks_of(blocks), ack(option::GO)].concat())
    };
    let good = [512, 4096, 1 << 20];
    assert!(whole(export_of(u64::MAX, 1), good).contains("larger than any file"));
    assert!(whole(export_of(1 << 20, 0), good).contains("no flags"));
    assert!(whole(export_of(1 << 20, 1), [0, 4096, 1 << 20]).contains("power of two"));
    assert!(whole(export_of(1 << 20, 1), [1 << 20; 3]).contains("power of two"));
    assert!(whole(export_of(1 << 20, 1), [4096, 4096, 512]).contains("smaller than"));
    let short = reply_of(option::GO, option_reply::INFO, &[0, 0, 1]);
    assert!(asked(short).contains("too short"));
}

#[test]
fn odd_block_sizes_are_adjusted() {
    let export = describe(1 << 20, 1, Some((1, 3, u32::MAX))).unwrap();
    assert_eq!((export.minimum, export.preferred), (1, 4096));
    assert_eq!(export.maximum, 32 << 20);
    let export = describe(1 << 20, 1, Some((4096, 512, 5000))).unwrap();
    assert_eq!((export.preferred, export.maximum), (4096, 4096));
}

/// Every reply, cut off at every byte.
#[test]
fn truncated_handshake_is_error() {
    let says = [
        greeting(3),
        ack(option::STRUCTURED_REPLY),
        export_of(1 << 30, 1),
        blocks_of([512, 4096, 1 << 20]),
        ack(option::GO),
    ]
    .concat();
    for len in 0..says.len() {
        assert!(ask(&[says[..len].to_vec()]).0.is_err(), "{len}");
    }
    assert!(ask(&[says]).0.is_ok());
}
