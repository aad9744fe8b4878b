//! The command line. The guest tests run the program, which cargo builds because this test is
//! there.
#![allow(clippy::unwrap_used, clippy::expect_used)] // A test fails by a panic.

use std::process::Command;

#[test]
fn unknown_client_is_refused_with_usage() {
    let output = Command::new(env!("CARGO_BIN_EXE_soak"))
        .arg("nobody")
        .output()
        .unwrap();
    assert!(!output.status.success());
    let printed = String::from_utf8_lossy(&output.stderr);
    assert!(printed.contains("usage: soak nvme|virtio"), "{printed}");
}
