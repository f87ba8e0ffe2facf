-- The events of one table of an Nsight Systems export, as rows of traces.py: LABEL, that is kind, name, process, thread,
-- two texts that only to_chrome_trace writes, device, stream; start in ns, duration in us, correlation, bytes.
-- globalTid and globalPid hold process and thread, 24 bits each; correlations count from 1 in every process.
-- In braces stands a column, or NULL where the table lacks it. Marks, which have no end, are no spans.
SELECT '{table_category}',
    CAST(COALESCE({text}, strings.value,
        'Memcpy ' || CASE {copyKind} WHEN 1 THEN 'HtoD' WHEN 2 THEN 'DtoH' WHEN 8 THEN 'DtoD' WHEN 10 THEN 'PtoP' END
        || CASE {srcKind} WHEN 0 THEN ' (Pageable' WHEN 1 THEN ' (Pinned' WHEN 2 THEN ' (Device' ELSE ' (?' END
        || CASE {dstKind} WHEN 0 THEN ' -> Pageable)' WHEN 1 THEN ' -> Pinned)' WHEN 2 THEN ' -> Device)' ELSE ' -> ?)' END,
        '{table_category}') AS TEXT) AS name,
    COALESCE(COALESCE({globalTid}, {globalPid}) >> 24 & 0xFFFFFF, -1) AS process,
    COALESCE(COALESCE({globalTid}, {globalPid}) & 0xFFFFFF, -1) AS thread,
    '',
    '',
    COALESCE({deviceId}, -1),
    COALESCE({streamId}, -1),
    CAST([start] AS INTEGER),
    ([end] - [start]) / 1000.0,
    CASE WHEN {correlationId} > 0
        THEN (COALESCE({globalTid}, {globalPid}) >> 24 & 0xFFFFFF) << 32 | {correlationId} ELSE -1 END,
    CAST(COALESCE({bytes}, -1) AS INTEGER)
FROM {table}
LEFT JOIN (SELECT id, MIN(value) AS value FROM StringIds GROUP BY id) AS strings
    ON strings.id = COALESCE({nameId}, {textId}, {demangledName})
WHERE [start] NOTNULL AND [end] NOTNULL
