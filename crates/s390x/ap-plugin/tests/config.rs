// SPDX-License-Identifier: GPL-2.0-or-later

//! The plugin's arguments. The library itself can only be loaded by QEMU,
//! so this takes its file in.
#![allow(clippy::unwrap_used, clippy::expect_used)] // A test fails by a panic.
#![allow(clippy::indexing_slicing, clippy::panic)]

#[path = "../src/config.rs"]
mod config;

use ap::{Facilities, Mask};
use config::Config;

fn parse(arguments: &[&str]) -> Result<Config, String> {
    let arguments: Vec<String> = arguments.iter().map(ToString::to_string).collect();
    Config::parse(&arguments)
}

#[test]
fn config_without_arguments_has_two_cards_and_one_domain() {
    let config = parse(&[]).unwrap();
    assert_eq!(config.adapters, Mask::from_iter([0, 1]));
    assert_eq!(config.domains, Mask::from_iter([6]));
    assert_eq!(config.control_domains, Mask::EMPTY);
    assert_eq!(config.facilities, Facilities::ALL);
    assert!(!config.log);
}

#[test]
fn config_arguments_accumulate() {
    let config = parse(&[
        "adapter=3",
        "domain=71",
        "adapter=255",
        "control-domain=200",
        "interruption=off",
        "log=on",
    ]);
    let config = config.unwrap();
    assert_eq!(config.adapters, Mask::from_iter([3, 255]));
    assert_eq!(config.domains, Mask::from_iter([71]));
    assert_eq!(config.control_domains, Mask::from_iter([200]));
    assert!(!config.facilities.interruption && config.facilities.test);
    assert!(config.log);
}

#[test]
fn config_error_names_invalid_argument() {
    for wrong in [
        "adapter",
        "adapter=",
        "adapter=256",
        "domain=-1",
        "log=yes",
        "cards=2",
        "interruption=",
    ] {
        let error = parse(&["adapter=1", wrong]).unwrap_err();
        assert!(error.contains(&format!("{wrong:?}")), "{error}");
    }
}
