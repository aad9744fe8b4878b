//! Bill of materials in the form of CycloneDX 1.5.

use crate::crates::{Crate, Id, Program};
use anyhow::Result;
use serde_json::{Value, json};

/// Package URL of a crate: of the registry, or of this project.
fn purl((name, version): &Id, described: &Crate) -> String {
    if described.checksum.is_some() {
        format!("pkg:cargo/{name}@{version}")
    } else {
        format!("pkg:generic/vnvme/{name}@{version}")
    }
}

fn component(id: &Id, described: &Crate, kind: &str) -> Value {
    let purl = purl(id, described);
    let mut component = json!({
        "type": kind,
        "bom-ref": purl,
        "name": id.0,
        "version": id.1,
        "purl": purl,
        "licenses": [{ "expression": expression(&described.license) }],
    });
    if let Some(fields) = component.as_object_mut() {
        if let Some(checksum) = &described.checksum {
            let hashes = json!([{ "alg": "SHA-256", "content": checksum }]);
            fields.insert("hashes".to_owned(), hashes);
        }
        if let Some(repository) = &described.repository {
            let references = json!([{ "type": "vcs", "url": repository }]);
            fields.insert("externalReferences".to_owned(), references);
        }
    }
    component
}

/// SPDX expression of a manifest; older manifests write a slash for OR.
fn expression(license: &str) -> String {
    let parts = license.split('/').map(str::trim);
    parts.collect::<Vec<_>>().join(" OR ")
}

/// Writes the bill of materials.
pub fn write(program: &Program, timestamp: &str) -> Result<String> {
    let mut components = Vec::new();
    let mut dependencies = Vec::new();
    let std = format!("pkg:generic/rust-std@{}", program.rust);
    let mut own = Value::Null;
    for (id, described) in &program.crates {
        let uses = described.uses.iter();
        let mut uses: Vec<String> = uses
            .filter_map(|id| Some(purl(id, program.crates.get(id)?)))
            .collect();
        if *id == program.id {
            uses.push(std.clone());
            own = component(id, described, "application");
        } else {
            components.push(component(id, described, "library"));
        }
        uses.sort();
        dependencies.push(json!({ "ref": purl(id, described), "dependsOn": uses }));
    }
    components.push(json!({
        "type": "library",
        "bom-ref": std,
        "name": "rust-std",
        "version": program.rust,
        "purl": std,
        "licenses": [{ "expression": "MIT OR Apache-2.0" }],
    }));
    let bill = json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": { "timestamp": timestamp, "component": own },
        "components": components,
        "dependencies": dependencies,
    });
    Ok(serde_json::to_string_pretty(&bill)? + "\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn bill_lists_each_crate_once_and_refers_to_listed_ones_only() {
        let program = crate::crates::read("x86_64-unknown-linux-gnu").unwrap();
        let text = write(&program, "2026-01-01T00:00:00Z").unwrap();
        let bill: Value = serde_json::from_str(&text).unwrap();
        let components = bill["components"].as_array().unwrap();
        // All but the program, and the standard library.
        assert_eq!(components.len(), program.crates.len());
        let of = |value: &Value| value["bom-ref"].as_str().unwrap().to_owned();
        let mut listed: BTreeSet<String> = components.iter().map(of).collect();
        assert_eq!(listed.len(), components.len());
        listed.insert(of(&bill["metadata"]["component"]));
        for dependency in bill["dependencies"].as_array().unwrap() {
            for used in dependency["dependsOn"].as_array().unwrap() {
                assert!(listed.contains(used.as_str().unwrap()), "{used}");
            }
        }
    }

    #[test]
    fn old_expression_is_understood() {
        assert_eq!(expression("MIT/Apache-2.0"), "MIT OR Apache-2.0");
        assert_eq!(expression("MIT OR Apache-2.0"), "MIT OR Apache-2.0");
    }
}
