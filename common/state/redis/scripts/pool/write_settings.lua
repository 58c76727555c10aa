-- The launcher gives the planner the settings of the mesh, which is up from now on.
redis.call('SET', MESH .. ':settings', '{"pool":' .. args.pool .. ',"up_since_ms":' ..
  string.format('%.0f', NOW) .. '}')
return cjson.encode({up_since_ms = NOW})
