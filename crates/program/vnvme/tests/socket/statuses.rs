//! Requests that are refused by the control API. Errors of the sender have a status of 400 to 499
//! and a sentence, and change nothing.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use serde_json::{Value, json};

use crate::common::*;

/// Requests: method and address, body (DIR is the folder that may be opened in), status, words of
/// the answer. Bodies of two words, `SOCKET VOLUME`, stand for an export that is to be added.
const CASES: &str = r##"
# Requests that the API does not know.
GET /v1/nothing |  | 404 | /v1/openapi.json
PUT /v1/disks |  | 405 | not PUT
GET /v1/disks?sort=name |  | 400 | unknown query parameter "sort"
GET /v1/disks/%ff |  | 400 | UTF-8
POST /v1/disks |  | 400 | no body
POST /v1/disks | { | 400 | the body of the request: EOF while parsing an object at line 1 column 1; it is JSON
POST /v1/disks | [] | 400 | invalid
POST /v1/disks | {} | 400 | kind
POST /v1/disks | {"kind": "disk", "table": {}} | 400 | unknown variant
# A table that is wrong.
POST /v1/disks | {"kind": "controller", "table": {"socket": "DIR/x.sock"}} | 400 | missing field `namespace`
POST /v1/disks | {"kind": "controller", "table": {"socket": 7, "namespace": []}} | 400 | socket: 7 is not text; write "7" with quotation marks
POST /v1/disks | {"kind": "controller", "table": {"socket": "DIR/x.sock", "namespace": []}} | 400 | no volume
POST /v1/disks | DIR/x.sock iscsi://x | 400 | iscsi:// is not a kind of volume
POST /v1/disks | DIR/x.sock mem://lots | 400 | a size begins with
POST /v1/disks | DIR/x.sock mem://1M?iops=fast | 400 | option iops=fast
POST /v1/disks | DIR/x.sock mem://1M?iosp=5 | 400 | did you mean "iops"?
POST /v1/disks | DIR/x.sock DIR/none.raw | 400 | no such file
POST /v1/disks | DIR/x.sock DIR | 400 | is a directory
POST /v1/disks | DIR/x.sock DIR/disk.raw?offset=1T | 400 | does not lie within
POST /v1/disks | DIR/x.sock DIR/disk.raw?partition=1 | 400 | partition
POST /v1/disks | DIR/none/x.sock mem://1M | 400 | does not exist; make it
POST /v1/disks | /none/x.sock mem://1M | 400 | option allow
# Names, sockets and volumes of other disks.
POST /v1/disks | DIR/a.sock mem://1M | 409 | there already
POST /v1/disks | DIR/x.sock DIR/used.raw | 409 | used.raw
POST /v1/disks | DIR/disk.raw mem://1M | 409 | not a socket
# Disks and namespaces that are there, or not.
GET /v1/disks/x |  | 404 | no disk is called
DELETE /v1/disks/x |  | 404 | no disk is called
DELETE /v1/disks/a?force=perhaps |  | 400 | true or false
POST /v1/disks/a/namespaces | {"volume": "iscsi://x"} | 400 | not a kind of volume
POST /v1/disks/a/namespaces | {"volume": "DIR/none.raw"} | 400 | no such file
POST /v1/disks/a/namespaces | {"volume": "DIR/used.raw"} | 409 | used.raw
POST /v1/disks/a/namespaces | {"volume": "mem://1M", "nsid": 1} | 409 | already
POST /v1/disks/a/namespaces | {"volume": "mem://1M", "nsid": 99} | 400 | max-namespaces
POST /v1/disks/a/namespaces | {"volume": "mem://1M", "nguid": "1"} | 400 | 32 hexadecimal
POST /v1/disks/a/namespaces | {"volume": "mem://1M", "block-size": 1000} | 400 | 512 or 4096
DELETE /v1/disks/a/namespaces/7 |  | 404 | no namespace 7
DELETE /v1/disks/a/namespaces/first |  | 400 | not a namespace ID
DELETE /v1/disks/b/namespaces/1 |  | 409 | no controller
PATCH /v1/disks/a/namespaces/1 | {"bytes": 4096} | 409 | cannot be changed
PATCH /v1/disks/a/namespaces/1 | {"bytes": "4K"} | 400 | invalid type
PATCH /v1/disks/b/namespaces/1 | {"bytes": 1000} | 400 | not a multiple
PATCH /v1/disks/a/namespaces/9 | {"bytes": 4096} | 404 | no namespace 9
# Configurations as a whole.
POST /v1/apply | {"controler": []} | 400 | did you mean
POST /v1/apply | {"vhost-user-blk": [{"socket": "DIR/x.sock", "volume": "DIR/none.raw"}]} | 400 | nothing was changed
POST /v1/apply?dry-run=1 | {} | 400 | true or false
# Limits, paths and devices.
PATCH /v1/limits | {} | 200 | 
PATCH /v1/limits | {"iops": 5} | 400 | no volume is selected
PATCH /v1/limits | {"disk": "a", "iops": -5} | 400 | invalid
PATCH /v1/limits | {"disk": "a", "weight": 0} | 400 | a weight is 1 to
PATCH /v1/limits | {"disk": "x", "iops": 5} | 404 | no disk is called
PATCH /v1/limits | {"volume": "x", "iops": 5} | 404 | no volume that is open
PATCH /v1/paths | {"path": "direct"} | 400 | no disk is selected
PATCH /v1/paths | {"disk": "a", "path": "direct"} | 404 | direct path
POST /v1/devices/0000:00:01.0/suspend |  | 404 | no device
"##;

const SERVED: &str = r#"
[[controller]]
name = "a"
socket = "DIR/a.sock"
namespace = [{ volume = "mem://1M" }]
[[vhost-user-blk]]
name = "b"
socket = "DIR/b.sock"
volume = "DIR/used.raw"
"#;

/// Status and body of an answer.
fn ask(control: &str, method: &str, address: &str, body: &str) -> (u16, String) {
    let mut stream = UnixStream::connect(control).unwrap();
    stream.set_read_timeout(Some(WAIT_TIMEOUT)).unwrap();
    let len = body.len();
    let head = format!("{method} {address} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n");
    let request = format!("{head}Content-Length: {len}\r\n\r\n{body}");
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let status = answer.split(' ').nth(1).unwrap().parse().unwrap();
    let (_, body) = answer.split_once("\r\n\r\n").unwrap();
    (status, body.to_owned())
}

fn export(socket: &str, volume: &str) -> String {
    let table = json!({"socket": socket, "volume": volume});
    json!({"kind": "vhost-user-blk", "table": table}).to_string()
}

#[test]
fn api_errors_have_status_of_their_cause() {
    let test_dir = TestDir::new();
    let dir = text(test_dir.path("x").parent().unwrap());
    let disk = test_dir.disk("disk.raw", 1 << 20);
    test_dir.disk("used.raw", 1 << 20);
    let config = test_dir.path("served.toml");
    std::fs::write(&config, SERVED.replace("DIR", &dir)).unwrap();
    let control = text(&test_dir.path("ctl"));
    let args = ["daemon", "--control", &control, "--allow", &dir, "--config"];
    let daemon = Daemon::spawn(&[&args[..], &[&text(&config)]].concat());
    for socket in ["a.sock", "b.sock"] {
        daemon.wait_listening(&test_dir.path(socket));
    }
    let before = ask(&control, "GET", "/v1/disks", "");
    assert_eq!(before.0, 200);
    let mut wrong = Vec::new();
    let cases = CASES
        .lines()
        .filter(|line| !line.is_empty() && !line.starts_with('#'));
    for case in cases {
        let [request, body, status, words]: [&str; 4] =
            case.split(" | ").collect::<Vec<_>>().try_into().unwrap();
        let (method, address) = request.split_once(' ').unwrap();
        let status: u16 = status.parse().unwrap();
        let whole = match body.split_once(' ') {
            Some((socket, volume)) if socket.contains('/') => export(socket, volume),
            _ => body.to_owned(),
        };
        let (found, told) = ask(&control, method, address, &whole.replace("DIR", &dir));
        let error: Value = serde_json::from_str(&told).unwrap_or_default();
        let error = error["error"].as_str().unwrap_or_default().to_owned();
        let is_told = status < 400 || (!error.is_empty() && error.contains(words));
        if found != status || !is_told {
            wrong.push(format!(
                "{method} {address} {body}\n  wanted {status} {words}\n  found  {found} {told}"
            ));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert_eq!(
        ask(&control, "GET", "/v1/disks", ""),
        before,
        "nothing has changed"
    );
    assert!(!test_dir.path("x.sock").exists());
    // A file that is free again can be had.
    let add = export(&text(&test_dir.path("x.sock")), &disk);
    assert_eq!(ask(&control, "POST", "/v1/disks", &add).0, 201);
    daemon.end();
}
